package tests

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// flushes sends parts of a stream, with pauses. It ends early if the router leaves.
func flushes(w http.ResponseWriter, r *http.Request, pause time.Duration, parts ...string) {
	_, _ = io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "text/event-stream")
	for _, part := range parts {
		_, _ = io.WriteString(w, part)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-time.After(pause):
		}
	}
}

func setAll(engines []*canned.Engine, h http.HandlerFunc) {
	for _, e := range engines {
		e.SetHandler(h)
	}
}

// TestFirstTokenOfTheRest has an answer whose rest takes longer than the limit for the first token.
func TestFirstTokenOfTheRest(t *testing.T) {
	takesSeconds(t)
	s := newStory(40)
	s.pace = 100 * time.Millisecond
	caddy, _ := storyEngines(t, 3, s, "pool restfirst", "timeouts {\nfirst_token 2s\n}")
	a := caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, "first?", ""), "X-Cut", "5")
	if g := readTold(a.body); a.err != nil || g.text != s.text() || g.done != 1 || caddy.logged(t, markedDown) > 1 {
		t.Errorf("%v, done %d times, %q", a.err, g.done, g.text)
	}
}

// TestDrainLeavesWhatCannotMove drains a worker with streams that cannot go on elsewhere.
func TestDrainLeavesWhatCannotMove(t *testing.T) {
	takesSeconds(t)
	parts := func(one, last string) []string {
		return append(strings.Split(strings.Repeat(one+"\x00", 15), "\x00"), last, "data: [DONE]\n\n")
	}
	for name, v := range map[string]struct {
		path, body string
		parts      []string
	}{
		"assistant": {
			"/v1/chat/completions", `{"model":"m","stream":true,"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"Sure:"}]}`,
			parts(`data: {"id":"a","choices":[{"index":0,"delta":{"content":" x"},"finish_reason":null}]}`+"\n\n",
				`data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`+"\n\n"),
		},
		"ids": {
			"/v1/completions", `{"model":"m","stream":true,"prompt":[1,2,3,4]}`,
			parts(`data: {"id":"a","choices":[{"index":0,"text":" x","finish_reason":null}]}`+"\n\n",
				`data: {"id":"a","choices":[{"index":0,"text":"","finish_reason":"stop"}]}`+"\n\n"),
		},
	} {
		engines := startEngines(t, 2, canned.Pace{})
		drained := make(chan struct{})
		setAll(engines, inferencesOnly(func(w http.ResponseWriter, r *http.Request) {
			flushes(w, r, 0, v.parts[:5]...)
			<-drained
			flushes(w, r, 100*time.Millisecond, v.parts[5:]...)
		}))
		pool := "drain" + name
		caddy := startCaddy(t, route(engines, "pool "+pool, "engine vllm", "retry_budget 100% 1000/s"))
		ended := make(chan answer, 1)
		go func() { ended <- caddy.post(t.Context(), v.path, []byte(v.body)) }()
		eventually(t, "the stream", func() bool { return engines[0].Active()+engines[1].Active() > 0 })
		for _, e := range engines {
			if e.Active() > 0 {
				caddy.api(t, http.MethodPost, "/pools/"+pool+"/workers/"+e.Addr()+"/drain?move", nil, nil)
			}
		}
		close(drained)
		if a := <-ended; a.err != nil || strings.Count(string(a.body), "[DONE]") != 1 || strings.Contains(string(a.body), brokenEvent) {
			t.Errorf("%s: %v, %q", name, a.err, a.body)
		}
	}
}

// TestRequestThatEndsEngines has a request that ends each engine that gets it, before its first token or
// behind it. Few engines get it.
func TestRequestThatEndsEngines(t *testing.T) {
	for _, tokens := range []int{0, 3} {
		engines := startEngines(t, 8, canned.Pace{})
		var asked atomic.Int32
		setAll(engines, func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1)%3 == 1 {
				text := strings.Repeat(`data: {"id":"a","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}`+"\n\n", tokens)
				flushes(w, r, 20*time.Millisecond, ": begins\n\n"+text)
			}
			panic(http.ErrAbortHandler)
		})
		caddy := startCaddy(t, route(engines, fmt.Sprint("pool ends", tokens), "engine vllm"))
		caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, "ends engines", ""))
		if n := asked.Load(); n > 3 {
			t.Errorf("%d tokens: %d engines were asked", tokens, n)
		}
	}
}

// TestStreamsWithoutReasons ends streams whose engine gives neither a reason nor [DONE].
func TestStreamsWithoutReasons(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	setAll(engines, func(w http.ResponseWriter, r *http.Request) {
		flushes(w, r, 0, `data: {"id":"a","choices":[{"index":0,"text":" w0"}]}`+"\n\n", `data: {"id":"a","choices":[{"index":0,"text":" w1"}]}`+"\n\n")
	})
	caddy := startCaddy(t, route(engines, "pool noreasons", "engine other"))
	a := caddy.post(t.Context(), "/v1/completions", storyBody(false, "q?", ""))
	if a.err != nil || strings.Count(string(a.body), "w0") != 1 || caddy.logged(t, markedDown) > 0 {
		t.Errorf("%v, %q", a.err, a.body)
	}
}
