package tests

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// entry is a line of Caddy's log.
type entry struct {
	TS float64 // Unix time in seconds

	Level, Msg, Pool, Upstream, Condition, Setting, Value, Effect, Advice string
}

// entries returns the lines of Caddy's log with a message that begins so.
func (s *server) entries(t *testing.T, message string) []entry {
	t.Helper()
	data, err := os.ReadFile(s.log)
	if err != nil {
		t.Fatal(err)
	}
	var found []entry
	for line := range strings.Lines(string(data)) {
		var e entry
		if json.Unmarshal([]byte(line), &e) == nil && strings.HasPrefix(e.Msg, message) {
			found = append(found, e)
		}
	}
	return found
}

// conditions returns the lines of Caddy's log in which a condition begins whose name begins so.
func (s *server) conditions(t *testing.T, name string) []entry {
	t.Helper()
	return slices.DeleteFunc(s.entries(t, "condition begins"), func(e entry) bool { return !strings.HasPrefix(e.Condition, name) })
}

const hurts = "setting hurts"

// TestSettingsThatHurtAreNamed has a configuration with each harmful setting once.
func TestSettingsThatHurtAreNamed(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, `kv_router {
		pool hurt
		reverse_proxy `+e.Addr()+` {
			response_buffers 4KiB
			transport http {
				response_header_timeout 30s
				read_timeout 2m
			}
		}
	}`, "servers {\ntimeouts {\nwrite 1m\n}\n}")
	want := map[string]string{
		"response_buffers": "4096", "response_header_timeout": "30s", "read_timeout": "2m0s",
	}
	got := s.entries(t, hurts)
	for _, l := range got {
		name := l.Setting
		if l.Level != "warn" || l.Value != want[name] || l.Value == "" || l.Effect == "" || l.Advice == "" || l.Pool != "hurt" {
			t.Errorf("the log says %+v, want the value %q, an effect and an advice", l, want[name])
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d warnings at start, want %d: %+v", len(got), len(want), got)
	}
	s.mustChat(t, ask("first"))
	s.mustChat(t, ask("second"))
	got = s.entries(t, hurts)
	if n := len(got) - len(want); n != 1 || got[len(want)].Setting != "servers timeouts write" || got[len(want)].Value != "1m0s" {
		t.Errorf("%d warnings of the server's timeout after two requests, want 1: %+v", n, got[len(want):])
	}
}

// TestSettingsThatDoNotHurtAreNotNamed has recommended settings and harmless ones that
// resemble harmful ones.
func TestSettingsThatDoNotHurtAreNotNamed(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, `kv_router {
		reverse_proxy `+e.Addr()+` {
			flush_interval 1s
			stream_timeout 1m
			lb_try_duration 1s
			transport http {
				response_header_timeout 10m
				read_timeout 1h
				keepalive_idle_conns_per_host 8
			}
		}
	}`, "servers {\ntimeouts {\nwrite 1h\nread_body 10s\n}\n}")
	s.mustChat(t, ask("hello").streamed())
	if got := s.entries(t, hurts); len(got) > 0 {
		t.Errorf("warnings of what does not hurt: %+v", got)
	}
}

// TestCompressedStreamsAreNoticed has an encode before kv_router that
// compresses event streams, and then one that does not.
func TestCompressedStreamsAreNoticed(t *testing.T) {
	const condition = "event streams are compressed"
	engines := startEngines(t, 1, canned.Pace{Words: 200})
	plain := "@site not path /v1/*\nencode @site gzip\n" + route(engines, "pool plain")
	s := startCaddy(t, plain)
	ask := func() answer { return s.chat(t.Context(), ask("tell me").streamed(), "Accept-Encoding", "gzip") }
	if a := ask(); a.header.Get("Content-Encoding") != "" {
		t.Fatalf("encode was kept away, and the stream is %q", a.header.Get("Content-Encoding"))
	}
	if got := s.conditions(t, condition); len(got) > 0 {
		t.Errorf("nothing is compressed, and the log says %+v", got)
	}
	s.mustReload(t, "encode gzip\n"+route(engines, "pool squeezed"))
	for range 3 {
		if a := ask(); a.header.Get("Content-Encoding") != "gzip" {
			t.Fatalf("the stream is %q: encode was to compress it", a.header.Get("Content-Encoding"))
		}
	}
	eventually(t, "the log says so", func() bool { return len(s.conditions(t, condition)) > 0 })
	if got := s.conditions(t, condition); len(got) != 1 || got[0].Pool != "squeezed" {
		t.Errorf("the log says %+v, want one line", got)
	}
	for pool, want := range map[string]float64{"plain": 0, "squeezed": 1} {
		if v := s.scrape(t).value("caddy_kv_router_incidents", `pool="`+pool+`"`); v != want {
			t.Errorf("pool %s has %v incidents, want %v", pool, v, want)
		}
	}
}

const engineWarnings = "caddy_kv_router_worker_engine_warnings"
