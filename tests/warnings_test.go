package tests

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// entry is a line of Caddy's log.
type entry struct {
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
	if err := s.reload("encode gzip\n" + route(engines, "pool squeezed")); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if a := ask(); a.header.Get("Content-Encoding") != "gzip" {
			t.Fatalf("the stream is %q: encode was to compress it", a.header.Get("Content-Encoding"))
		}
	}
	eventually(t, 2*time.Second, "the log says so", func() bool { return len(s.conditions(t, condition)) > 0 })
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

// wantWarning waits for a warning of a worker's engine in the log, the admin API and the
// metrics.
func (s *server) wantWarning(t *testing.T, dial, what, flag string) {
	t.Helper()
	eventually(t, 10*time.Second, "a warning: "+what, func() bool { return len(s.conditions(t, what)) > 0 })
	if l := s.conditions(t, what); len(l) != 1 || l[0].Upstream != dial || !strings.Contains(l[0].Advice, flag) {
		t.Errorf("the log says %+v, want one line with the advice %s", l, flag)
	}
	if w := s.limited(t, dial).Engine.Warnings; len(w) != 1 || w[0].What != what || w[0].Effect == "" || !strings.Contains(w[0].Advice, flag) {
		t.Errorf("the admin API says %+v", w)
	}
	if n := s.scrape(t).value(engineWarnings, `worker="`+dial+`"`); n != 1 {
		t.Errorf("%s is %v, want 1", engineWarnings, n)
	}
}

// TestAnswersWithoutCachedTokensAreWarnedOf has an engine that reports no cached tokens,
// until it does.
func TestAnswersWithoutCachedTokensAreWarnedOf(t *testing.T) {
	const what = "answers carry no cached-token counts"
	tells := fakeSGLang(`"version":"0.5.19","page_size":16,"dp_size":1`)
	var reports atomic.Bool
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return tells(w, r)
		}
		usage := ""
		if reports.Load() {
			usage = fmt.Sprintf(withCached, 1900)
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, fakeChat(usage))
		return true
	})
	s := startCaddy(t, "kv_router "+f.addr())
	eventually(t, 10*time.Second, "the engine to be found out", func() bool { return s.fakeWorker(t, f.addr()).Engine.Type != "" })
	for i := range 30 { // prompts that no engine has cached
		s.mustChat(t, simChat(fmt.Sprint(i, " ", someWords(200))))
	}
	if w := s.limited(t, f.addr()).Engine.Warnings; len(w) > 0 {
		t.Fatalf("warnings %+v before a prompt was cached", w)
	}
	for range 21 {
		s.mustChat(t, simChat(someWords(1200)))
	}
	s.wantWarning(t, f.addr(), what, "--enable-cache-report")
	reports.Store(true)
	s.mustChat(t, simChat(someWords(1200)))
	eventually(t, 5*time.Second, "the warning to be over", func() bool { return s.logged(t, `"condition":"`+what) == 2 })
	if w := s.limited(t, f.addr()).Engine.Warnings; len(w) > 0 {
		t.Errorf("the admin API says %+v", w)
	}
}
