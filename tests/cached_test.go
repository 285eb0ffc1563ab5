package tests

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// countlessSGLang answers with what cached returns of a request's body: what is
// added to the usage.
func countlessSGLang(t *testing.T, cached func(body string) string) (*fake, *server) {
	t.Helper()
	tells := fakeSGLang(`"version":"0.5.19","page_size":1,"dp_size":1`)
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return tells(w, r)
		}
		b, _ := io.ReadAll(r.Body)
		body := string(b)
		if !strings.Contains(body, `"stream":true`) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, fakeChat(cached(body)))
			return true
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: %s\n\ndata: %s\n\ndata: [DONE]\n\n",
			`{"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"hi"}}]}`,
			`{"id":"x","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":2000,"completion_tokens":1`+cached(body)+`}}`)
		return true
	})
	s := startCaddy(t, "kv_router "+f.addr()+" {\ninject_usage\n}")
	s.mustChat(t, simChat("hello"))
	eventually(t, 10*time.Second, "the engine to be found out", func() bool { return s.fakeWorker(t, f.addr()).Engine.Type == "sglang" })
	return f, s
}

const withCached = `,"prompt_tokens_details":{"cached_tokens":%d}`

// TestAnswersWithoutACountProveNothing has an engine whose plain answers tell what
// was cached, and whose streams do not, though all is cached.
func TestAnswersWithoutACountProveNothing(t *testing.T) {
	f, s := countlessSGLang(t, func(body string) string {
		if strings.Contains(body, `"stream":true`) {
			return ""
		}
		return fmt.Sprintf(withCached, 1950)
	})
	prompt := func(i int) chat { return simChat(strings.Repeat(fmt.Sprint(" some words of ", i%6), 400)) }
	for i := range 12 {
		s.mustChat(t, prompt(i))
	}
	for i := range 24 {
		s.mustChat(t, prompt(i).streamed())
	}
	if n := s.scrape(t).value(mirrorCleared, `worker="`+f.addr()+`"`); n > 0 {
		t.Errorf("the cache model was cleared %v times", n)
	}
}

// TestLossShowsInPromptsThatEndAlike has an engine whose cache is lost for good,
// and prompts that differ in their beginning only.
func TestLossShowsInPromptsThatEndAlike(t *testing.T) {
	var lost atomic.Bool
	f, s := countlessSGLang(t, func(string) string {
		if lost.Load() {
			return ""
		}
		return fmt.Sprintf(withCached, 1950)
	})
	prompt := func(i int) chat { return simChat(fmt.Sprint(i%6) + someWords(1200)) }
	for i := range 12 {
		s.mustChat(t, prompt(i))
	}
	lost.Store(true)
	for i := range 6 {
		s.mustChat(t, prompt(i))
	}
	if n := s.scrape(t).value(mirrorCleared, `reason="mismatch"`, `worker="`+f.addr()+`"`); n != 1 {
		t.Errorf("the cache model was cleared %v times for it, want once", n)
	}
}

// TestComparedTokensAreOfTheSameAnswers has an engine that has nine in ten prompts
// not in its cache, and leaves out the count for these.
func TestComparedTokensAreOfTheSameAnswers(t *testing.T) {
	n := 0
	_, s := countlessSGLang(t, func(string) string {
		if n++; n%10 == 2 {
			return fmt.Sprintf(withCached, 1800)
		}
		return ""
	})
	before := s.scrape(t)
	for range 41 {
		s.mustChat(t, simChat(someWords(1200)))
	}
	after := s.scrape(t)
	share := func(tokens string) float64 {
		grown := func(what string) float64 {
			l := `tokens="` + what + `"`
			return after.value("caddy_kv_router_compared_tokens_total", l) - before.value("caddy_kv_router_compared_tokens_total", l)
		}
		return grown(tokens) / grown("prompt")
	}
	if p, r := share("predicted"), share("reported"); !(p > 0.7) || !(r > 0.05 && r < 0.2) {
		t.Errorf("predicted %.2f, reported %.2f of the prompts' tokens, want nearly all and 0.1", p, r)
	}
}
