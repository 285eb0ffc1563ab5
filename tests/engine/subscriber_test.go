package engine

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher/peer"
)

// told is one event as a subscriber decodes it.
type told struct {
	kind, medium  string
	hashes        []uint64
	parent        uint64
	first         bool
	tokens        []uint32
	lora, session string
	extra         string // extra_keys, as they are printed
	salt          string // of an SGLang
}

func whole(v any) uint64 {
	if n, ok := v.(int64); ok {
		return uint64(n)
	}
	n, _ := v.(uint64)
	return n
}

func tell(m map[string]any) told {
	e := told{first: m["parent_block_hash"] == nil, parent: whole(m["parent_block_hash"])}
	e.kind, _ = m["type"].(string)
	e.medium, _ = m["medium"].(string)
	e.lora, _ = m["lora_name"].(string)
	e.session, _ = m["session_id"].(string)
	e.salt, _ = m["cache_salt"].(string)
	if m["extra_keys"] != nil {
		e.extra = fmt.Sprint(m["extra_keys"])
	}
	hashes, _ := m["block_hashes"].([]any)
	for _, h := range hashes {
		e.hashes = append(e.hashes, whole(h))
	}
	list, _ := m["token_ids"].([]any)
	for _, n := range list {
		e.tokens = append(e.tokens, uint32(whole(n)))
	}
	return e
}

// tellBatch decodes a batch whose events are maps.
func tellBatch(t *testing.T, payload []byte) (events []told, rank int) {
	t.Helper()
	v, _, err := msgp.ReadIntfBytes(payload)
	if err != nil {
		t.Fatal(err)
	}
	doc := v.([]any)
	for _, m := range doc[1].([]any) {
		events = append(events, tell(m.(map[string]any)))
	}
	return events, int(whole(doc[2]))
}

// subscriber follows one rank.
type subscriber struct {
	t    *testing.T
	conn *peer.Conn
	next uint64
}

func hostPort(endpoint string) string { return strings.TrimPrefix(endpoint, "tcp://") }

// follow subscribes to a rank, which publishes next with that number.
func follow(t *testing.T, e *Engine, rank int, next uint64) *subscriber {
	t.Helper()
	pub, _ := e.EventEndpoints(rank)
	c, err := peer.Subscribe(hostPort(pub), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	eventually(t, "the subscription arrived", func() bool { return e.Events()[rank].Subscribers > 0 })
	return &subscriber{t, c, next}
}

// batch returns the next batch.
func (s *subscriber) batch() []told {
	s.t.Helper()
	m, err := s.conn.Next()
	if err != nil {
		s.t.Fatal(err)
	}
	if m.Seq != s.next {
		s.t.Fatalf("number %d, want %d", m.Seq, s.next)
	}
	s.next++
	events, _ := tellBatch(s.t, m.Payload)
	return events
}

// silent fails if there is another batch.
func (s *subscriber) silent() {
	s.t.Helper()
	if f, err := s.conn.Frames(30 * time.Millisecond); err == nil {
		s.t.Errorf("another batch: %q", f)
	}
}

// blocks describes an event in short.
func (e told) blocks() string {
	return fmt.Sprintf("%s %d first=%t %s", e.kind, len(e.hashes), e.first, e.medium)
}

func short(events []told) string {
	out := make([]string, len(events))
	for i, e := range events {
		out[i] = e.blocks()
	}
	return strings.Join(out, "; ")
}

func (s *subscriber) expect(want string) []told {
	s.t.Helper()
	got := s.batch()
	if short(got) != want {
		s.t.Fatalf("batch %s, want %s", short(got), want)
	}
	return got
}

// quiet waits until all events are sent.
func quiet(t *testing.T, e *Engine) {
	t.Helper()
	eventually(t, "all events are sent", func() bool {
		for _, s := range e.Events() {
			if !s.Quiet() {
				return false
			}
		}
		return true
	})
}

// noneLeft fails the test if goroutines of an engine outlive it.
func noneLeft(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		var stacks string
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
			buf := make([]byte, 1<<22)
			stacks = string(buf[:runtime.Stack(buf, true)])
			if !strings.Contains(stacks, "engine.(*rank)") && !strings.Contains(stacks, "publisher.(*") {
				return
			}
		}
		t.Errorf("goroutines are left:\n%s", stacks)
	})
}

func ids(list []int) []uint32 {
	out := make([]uint32, len(list))
	for i, n := range list {
		out[i] = uint32(n)
	}
	return out
}
