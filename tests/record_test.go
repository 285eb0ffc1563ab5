package tests

import (
	"bytes"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// TestRecordedTrace holds conversations with one system prompt, and makes a trace of the journal of
// the router that runs.
func TestRecordedTrace(t *testing.T) {
	const conversations, turns = 4, 3
	engines := []*engine.Engine{startSimulated(t, engine.Config{}), startSimulated(t, engine.Config{})}
	s := startCaddy(t, simulated(engines))
	rng := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // a test
	system := message{"system", prose(rng, 4000, 4000)}
	var talks [conversations]chat
	for turn := range turns {
		for i := range talks {
			k := &talks[i]
			if turn == 0 {
				*k = chat{Model: "sim-8b", Messages: []message{system}}
			}
			k.Messages = append(k.Messages, message{"user", prose(rng, 700, 900)})
			a := s.mustChat(t, *k)
			k.Messages = append(k.Messages, message{"assistant", a.text})
		}
	}
	var b bytes.Buffer
	var n int
	eventually(t, "all to be written", func() bool {
		b.Reset()
		var others int
		var err error
		n, others, err = journal.Trace(filepath.Join(filepath.Dir(s.log), "caddy", "kv_router", "default.journal"), &b)
		return err == nil && n == conversations*turns && others == 0
	})
	got, err := trace.Read(&b)
	if err != nil || len(got.Requests) != n || !got.Sessions || got.Closed {
		t.Fatalf("%+v, %v", got, err)
	}
	tokens, sessions := 0, make(map[int][]trace.Request)
	for _, r := range got.Requests {
		tokens += r.In
		if last := sessions[r.Session]; r.Turn != len(last) {
			t.Errorf("session %d has turn %d after %d", r.Session, r.Turn, len(last))
		} else if len(last) > 0 {
			before := last[len(last)-1].Blocks
			if len(before) >= len(r.Blocks) || !slices.Equal(before, r.Blocks[:len(before)]) {
				t.Errorf("session %d: a prompt does not go on from the one before", r.Session)
			}
		}
		sessions[r.Session] = append(sessions[r.Session], r)
	}
	first := got.Requests[0].Blocks
	if other := got.Requests[1].Blocks; len(sessions) != conversations || first[0] != other[0] || first[len(first)-1] == other[len(other)-1] {
		t.Errorf("%d sessions, which begin with %v and %v", len(sessions), first, other)
	}
	want := 0
	for _, e := range engines {
		for _, r := range e.Journal() {
			want += r.PromptTokens
		}
	}
	if tokens < want*8/10 || tokens > want*12/10 {
		t.Errorf("%d tokens of prompts, the engines had %d", tokens, want)
	}
}
