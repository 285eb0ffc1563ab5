package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/tidwall/gjson"
)

// namedIn returns the names of models in an answer or in its events.
func namedIn(a answer) (names []string) {
	add := func(doc []byte) {
		for _, path := range []string{"model", "message.model", "response.model"} {
			if v := gjson.GetBytes(doc, path); v.Exists() && !slices.Contains(names, v.Str) {
				names = append(names, v.Str)
			}
		}
	}
	if !strings.HasPrefix(a.header.Get("Content-Type"), "text/event-stream") {
		add(a.body)
		return names
	}
	for line := range bytes.SplitSeq(a.body, []byte("\n")) {
		if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
			add(data)
		}
	}
	return names
}

// startNamed starts an engine that serves some models in all APIs, and refuses others.
func startNamed(t *testing.T, models ...string) *modelEngine {
	t.Helper()
	e := &modelEngine{models: models}
	behind, err := url.Parse("http://" + startEngines(t, 1, canned.Pace{Words: 4})[0].Addr())
	noError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(behind)
	proxy.FlushInterval = -1
	e.fake = startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		if e.answer(w, r) {
			return true
		}
		if r.Method == http.MethodPost {
			r.Body = io.NopCloser(bytes.NewReader(body))
			proxy.ServeHTTP(w, r)
		}
		return r.Method == http.MethodPost
	})
	return e
}

const toQwen = "model qwen {\nto org/qwen-1\n}"

// TestPartsOfAnswersKeepTheirName asks for a whole answer and for a part of it. Headers describe the bytes that the
// client gets.
func TestPartsOfAnswersKeepTheirName(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	const doc = `{"id":"org/qwen-1","object":"model"}`
	e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Etag", `"1"`)
		w.Header().Set("Content-Type", "application/json")
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(doc))
	})
	s := startCaddy(t, route([]*canned.Engine{e}, toQwen))
	whole := s.request(t.Context(), http.MethodGet, "/v1/models/qwen", nil)
	if string(whole.body) != `{"id":"qwen","object":"model"}` || whole.header.Get("Etag") != "" || whole.header.Get("Accept-Ranges") != "" ||
		whole.header.Get("Content-Length") != fmt.Sprint(len(whole.body)) {
		t.Errorf("%s, header %v", whole.body, whole.header)
	}
	part := s.request(t.Context(), http.MethodGet, "/v1/models/qwen", nil, "Range", "bytes=0-20")
	if part.status != http.StatusPartialContent || string(part.body) != doc[:21] || part.header.Get("Content-Range") != fmt.Sprintf("bytes 0-20/%d", len(doc)) {
		t.Errorf("a part: status %d, %s, header %v", part.status, part.body, part.header)
	}
}

// TestPublicNames asks for a model by a public name in each API. The engine gets its own name, the client its own.
func TestPublicNames(t *testing.T) {
	e := startNamed(t, "org/qwen-1")
	s := startCaddy(t, "kv_router "+e.Addr()+" {\n"+toQwen+"\nmodel other {\nto org/qwen-1\n}\nresponse_headers X-KV-\n}")
	for path, body := range map[string]string{
		"/v1/chat/completions":                     `{"model":"qwen","messages":[{"role":"user","content":"\"model\":\"org/qwen-1\""}],"stream":%v}`,
		"/v1/completions":                          `{"prompt":"hi","stream":%v,"model" : "qwen"}`,
		"/v1/messages":                             `{"model":"qwen","max_tokens":9,"messages":[{"role":"user","content":"hi"}],"stream":%v}`,
		"/v1/responses":                            `{"model":"\u0071wen","input":"hi","stream":%v}`,
		"/v1/embeddings":                           `{"model":"qwen","input":["hi","there"],"x":%v}`,
		"/v1/rerank":                               `{"model":"qwen","query":"q","documents":["a","b"],"x":%v}`,
		"/v1/score":                                `{"model":"qwen","text_1":"a","text_2":"b","x":%v}`,
		"/openai/deployments/d/chat/completions":   `{"model":"qwen","messages":[{"role":"user","content":"hi"}],"stream":%v}`,
		"/v1/chat/completions?api-version=1&model": `{"model":"other","messages":[{"role":"user","content":"hi"}],"stream":%v}`,
	} {
		for _, stream := range []bool{false, true} {
			a := s.post(t.Context(), path, fmt.Appendf(nil, body, stream))
			want := []string{"qwen"}
			if strings.Contains(body, "other") {
				want[0] = "other"
			}
			if got := namedIn(a); a.status != http.StatusOK || a.err != nil || !slices.Equal(got, want) {
				t.Errorf("%s, stream %v: status %d, error %v, models %q\n%s", path, stream, a.status, a.err, got, a.body)
			}
			equal(t, a.header.Get("X-Kv-Engine-Model"), "org/qwen-1", "%s: the label", path)
		}
	}
	if _, wrong := e.counts(); len(wrong) > 0 {
		t.Errorf("the engine was asked for %q", wrong)
	}
	// clients may still use the engine's name
	if a := s.mustChat(t, askModel("org/qwen-1", 1)); !slices.Equal(namedIn(a), []string{"org/qwen-1"}) {
		t.Errorf("by the engine's name: %s", a.body)
	}
	if x := s.explain(t, askModel("qwen", 1).body()); x.Plan.Model != "org/qwen-1" || x.Plan.Public != "qwen" {
		t.Errorf("explained as %+v", x.Plan)
	}
	if a := s.chat(t.Context(), chat{Model: "qwen", Messages: []message{{"user", "hi"}}, Nvext: json.RawMessage(`{"annotations":["query_instance_id:"]}`)}); !slices.Equal(namedIn(a), []string{"qwen"}) {
		t.Errorf("a query is answered with %s", a.body)
	}
	if n := s.scrape(t).value(workerOutcomes, `model="org/qwen-1"`, `outcome="ok"`); n < 18 {
		t.Errorf("%v requests are counted for the engine's model", n)
	}
	s.booksAtZero(t)
}

// TestPublicNamesOutsideTheBody has public names in forms, queries and paths.
func TestPublicNamesOutsideTheBody(t *testing.T) {
	e := startRecorder(t, "org/whisper", func(w http.ResponseWriter, r *http.Request, body string) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case strings.Contains(body, "stream"):
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: {\"object\":\"transcription.chunk\",\"model\":\"org/whisper\",\"t\":\"org/whis")
			w.(http.Flusher).Flush()
			io.WriteString(w, "per\"}\n\ndata: [DONE]\n\n")
		case strings.HasPrefix(r.URL.Path, "/v1/models/"):
			fmt.Fprintf(w, `{"object":"model","id":%q,"root":"org/whisper"}`, strings.TrimPrefix(r.URL.Path, "/v1/models/"))
		default:
			fmt.Fprintf(w, `{"uri":%q,"model":"org/whisper"}`, r.RequestURI)
		}
	})
	s := startCaddy(t, "kv_router "+e.Addr()+" {\nmodel \"my ear\" {\nto org/whisper\n}\n}")
	eventually(t, "the model to be known", func() bool { return len(s.models(t)) == 1 })
	last := func() string {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.got[len(e.got)-1].body
	}
	short, long := strings.Repeat("RIFF", 10), strings.Repeat("RIFF\r\n--", 40_000)
	for _, v := range []struct {
		name, file string
		fileFirst  bool
		fields     []string
	}{
		{"Short", short, false, []string{"prompt", "my ear", "model", "my ear", "language", "en"}},
		{"Long", long, false, []string{"model", "my ear", "stream", "true"}},
		{"FileFirst", long, true, []string{"model", "my ear"}},
		{"FileFirstAndShort", short, true, []string{"stream", "true", "model", "my ear"}},
	} {
		kind, body := formOf(t, v.file, v.fileFirst, v.fields...)
		a := s.sendBy(t, http.MethodPost, "/v1/audio/transcriptions", body, "Content-Type", kind)
		if a.status != http.StatusOK || !slices.Equal(namedIn(a), []string{"my ear"}) {
			t.Errorf("%s: status %d, %s", v.name, a.status, a.body)
		}
		want := strings.Replace(body, "name=\"model\"\r\n\r\nmy ear\r\n", "name=\"model\"\r\n\r\norg/whisper\r\n", 1)
		if got := last(); got != want {
			t.Errorf("%s: the engine got another form of %d bytes, want %d: %.400q", v.name, len(got), len(want), got)
		}
	}
	const made = `{"x":1, "model":"my ear","prompt":"my ear"}`
	if a := s.sendBy(t, http.MethodPost, "/v1/images/generations", made, "Content-Type", "application/json"); a.status != http.StatusOK || last() != strings.Replace(made, "my ear", "org/whisper", 1) {
		t.Errorf("the engine got %q", last())
	}
	for path, want := range map[string]string{
		"/v1/realtime?x=1&model=my%20ear&y=%2F":          "/v1/realtime?x=1&model=org%2Fwhisper&y=%2F",
		"/openai/deployments/my%20ear/audio/speech?v=%2": "/openai/deployments/org/whisper/audio/speech?v=%2",
	} {
		if a := s.sendBy(t, http.MethodPost, path, ""); gjson.GetBytes(a.body, "uri").Str != want || !slices.Equal(namedIn(a), []string{"my ear"}) {
			t.Errorf("%s is asked as %s", path, a.body)
		}
	}
	if a := s.sendBy(t, http.MethodGet, "/v1/models/my%20ear", ""); string(a.body) != `{"object":"model","id":"my ear","root":"org/whisper"}` {
		t.Errorf("the description of the model is %s", a.body)
	}
}

// TestPublicModelsAreListed has public names in place of the models that they stand for.
func TestPublicModelsAreListed(t *testing.T) {
	for _, v := range []struct {
		block string
		want  []string
	}{
		{"model qwen {\nto a\n}\nmodel none {\nto nowhere\n}", []string{"b", "c", "qwen"}},
		{"model qwen {\nto a weight 9\nto b weight 1\n}\nmodel b", []string{"b", "c", "qwen"}},
		{"model a {\nto a\nto c\n}", []string{"a", "b"}},
		{"model b {\nto c\n}\nmodel x {\nto a\n}", []string{"b", "x"}},
	} {
		engines := []*modelEngine{startModelEngine(t, "a", "b"), startModelEngine(t, "c")}
		s := startCaddy(t, "kv_router "+engines[0].Addr()+" "+engines[1].Addr()+" {\npolicy random\n"+v.block+"\n}")
		eventually(t, fmt.Sprint(v.block, ": the list to be ", v.want), func() bool { return slices.Equal(s.models(t), v.want) })
	}
}

// TestSplitModels has 90 of 100 sessions at one model, and 10 at the other. A session and a conversation stay.
func TestSplitModels(t *testing.T) {
	engines := []*modelEngine{startNamed(t, "qwen", "qwen-2"), startNamed(t, "qwen-2", "qwen")}
	const split = "model qwen {\nto qwen weight 9\nto qwen-2 weight 1\nto off weight 0\n}"
	site := func(block string) string {
		return "kv_router " + engines[0].Addr() + " " + engines[1].Addr() + " {\nresponse_headers X-KV-\n" + block + "\n}"
	}
	s := startCaddy(t, site(split))
	side := func(turns []message, header ...string) (other bool) {
		a := s.mustChat(t, chat{Model: "qwen", Messages: turns}, header...)
		if !slices.Equal(namedIn(a), []string{"qwen"}) {
			t.Errorf("the answer has %q", namedIn(a))
		}
		return a.header.Get("X-Kv-Engine-Model") != ""
	}
	const n = 400
	sides := make(map[string]bool)
	all := func(visit func(name string, other bool)) {
		for i := range n {
			id := fmt.Sprint("session ", i)
			visit(id, side([]message{{"user", fmt.Sprint("turn ", len(sides), i)}}, "X-Session-Id", id))
			system := message{"system", "You are of use."}
			turns := []message{system, {"user", fmt.Sprint("question ", i)}}
			visit(fmt.Sprint("conversation ", i), side(turns))
			visit(fmt.Sprint("conversation ", i), side(append(turns, message{"assistant", "so"}, message{"user", "and?"})))
		}
	}
	seen, moved := map[string]int{}, 0
	all(func(name string, other bool) {
		if before, known := sides[name]; known && before != other {
			moved++
		}
		sides[name] = other
		if other {
			seen[strings.Fields(name)[0]]++
		}
	})
	// 10 of 100, within four standard deviations
	for kind, want := range map[string]float64{"session": n / 10, "conversation": n / 5} {
		if got := float64(seen[kind]); math.Abs(got-want) > 4*math.Sqrt(want)*want/(n/10) {
			t.Errorf("%v of %d requests of a %s are at the other model, want about %v", got, n, kind, want)
		}
	}
	s.mustReload(t, site(strings.Replace(split, "weight 9", "weight 4", 1)))
	more := 0
	all(func(name string, other bool) {
		if sides[name] && !other {
			moved++
		}
		if other && !sides[name] {
			more++
			sides[name] = true
		}
	})
	if moved > 0 || more == 0 {
		t.Errorf("%d sessions left their side, and %d new ones came with more weight", moved, more)
	}
}

// TestPublicNamesOnOtherWorkers has a request, and then a stream, go on at another worker.
func TestPublicNamesOnOtherWorkers(t *testing.T) {
	s, engines := storyEngines(t, 2, newStory(24), "pool renamed", "model m {\nto engine-m\n}")
	for cut := range 12 {
		for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
			body := storyBody(strings.Contains(path, "chat"), fmt.Sprint(path, cut, "?"), `,"max_tokens":100`)
			a := s.post(t.Context(), path, body, "X-Cut", fmt.Sprint(cut), "X-How", "half")
			if g := readTold(a.body); a.err != nil || g.text != newStory(24).text() || g.bad != 0 {
				t.Errorf("%s, cut after %d: error %v, %v", path, cut, a.err, g)
			}
			if got := namedIn(a); !slices.Equal(got, []string{"m"}) || bytes.Contains(a.body, []byte("engine-m")) {
				t.Errorf("%s, cut after %d: models %q\n%s", path, cut, got, a.body)
			}
		}
	}
	if n := s.scrape(t).value(resumedTotal, `pool="renamed"`, `outcome="ok"`); n < 20 {
		t.Errorf("only %v streams moved", n)
	}
	engines[0].SetHandler(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	engines[1].SetHandler(nil)
	for range 4 {
		a := s.chat(t.Context(), askModel("m", 1))
		if got := namedIn(a); !a.ok() || !slices.Equal(got, []string{"m"}) || a.engine() != engines[1].Name() {
			t.Errorf("a request that was refused once: status %d, models %q, by %s", a.status, got, a.engine())
		}
	}
	s.booksAtZero(t)
}

// TestKeptResponsesDecideTheSide has the next turn of a response that an engine keeps go to the model of that
// engine.
func TestKeptResponsesDecideTheSide(t *testing.T) {
	engines := []*modelEngine{startNamed(t, "one"), startNamed(t, "two")}
	s := startCaddy(t, "kv_router "+engines[0].Addr()+" "+engines[1].Addr()+" {\nmodel both {\nto one\nto two\n}\nresponse_headers X-KV-\n}")
	for i := range 20 {
		previous := ""
		var at []string
		for turn := range 3 {
			body := fmt.Sprintf(`{"model":"both","input":"%d, turn %d"%s}`, i, turn, previous)
			a := s.post(t.Context(), "/v1/responses", []byte(body))
			if a.status != http.StatusOK {
				t.Fatalf("conversation %d, turn %d: status %d, %s", i, turn, a.status, a.body)
			}
			previous = fmt.Sprintf(`,"previous_response_id":%q`, gjson.GetBytes(a.body, "id").Str)
			at = append(at, a.header.Get("X-Kv-Worker"))
		}
		if at[0] != at[1] || at[1] != at[2] {
			t.Errorf("conversation %d is at %q", i, at)
		}
	}
	for i, e := range engines {
		if served, wrong := e.counts(); served == 0 || len(wrong) > 0 {
			t.Errorf("engine %d served %d requests, and was asked for %q", i, served, wrong)
		}
	}
}

// TestPublicNamesOfAdaptersAndPhases has a public name of a LoRA adapter, and one of a model whose requests are
// split.
func TestPublicNamesOfAdaptersAndPhases(t *testing.T) {
	e := startSimulated(t, engine.Config{LoRAs: []string{"ad"}})
	s := startCaddy(t, route([]*engine.Engine{e}, "model helper {\nto ad\n}", "pool adapters"))
	for _, c := range []chat{simChat("hi"), simChat("hi").streamed()} {
		c.Model = "helper"
		if a := s.mustChat(t, c); !slices.Equal(namedIn(a), []string{"helper"}) {
			t.Errorf("the adapter answers as %q", namedIn(a))
		}
	}
	p := startApart(t, engine.Config{Flavour: engine.VLLM}, 1, 1, "split always", "model qwen {\nto sim-8b\n}")
	for _, c := range []chat{simChat(someWords(300)), simChat(someWords(300)).streamed()} {
		c.Model = "qwen"
		if a := p.mustChat(t, c); !slices.Equal(namedIn(a), []string{"qwen"}) {
			t.Errorf("a split request is answered as %q", namedIn(a))
		}
	}
	if n := p.scrape(t).value(phasesTotal, `outcome="ok"`); n == 0 {
		t.Error("no request was split")
	}
}
