package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/tidwall/gjson"
)

// keeper is an engine that keeps things by id, and knows no others.
type keeper struct {
	mu   sync.Mutex
	name string
	kept map[string]bool
}

// made are the members of the answer to a request that makes something. %s is the id.
var made = map[string]string{
	"/v1/videos":        `"id":%q,"object":"video","status":"queued"`,
	"/v1/files":         `"id":%q,"object":"file"`,
	"/v1/batches":       `"id":%q,"input_file_id":"x","output_file_id":null`,
	"/v1/conversations": `"id":%q,"object":"conversation"`,
	"/v1/audio/voices":  `"success":true,"voice":{"name":%q,"created_at":1}`,
	"/jobs":             `"task":{"job_id":%q},"queue":[1,2]`,
}

func (k *keeper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if r.URL.Path == "/v1/models" {
		lists("m")(w, r)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	k.mu.Lock()
	defer k.mu.Unlock()
	if form, ok := made[r.URL.Path]; ok && r.Method == http.MethodPost && !k.names(string(body)) {
		id := fmt.Sprintf("%s-%d", k.name, len(k.kept))
		k.kept[id] = true
		fmt.Fprintf(w, `{"pad":"%s",`+form+`}`, strings.Repeat("x", len(k.kept)*100), id) // the client gets it in pieces
		return
	}
	if k.names(r.URL.Path) || k.names(r.URL.RawQuery) || k.names(string(body)) {
		io.WriteString(w, `{"object":"response","status":"completed","output":[]}`)
		return
	}
	w.WriteHeader(http.StatusNotFound)
	io.WriteString(w, `{"error":{"message":"no such thing","code":404}}`)
}

// names returns whether a text has an id of what the engine keeps.
func (k *keeper) names(text string) bool {
	for id := range k.kept {
		for _, end := range []string{"/", `"`, "&", ":", ""} {
			if at := id + end; end != "" && strings.Contains(text, at) || end == "" && strings.HasSuffix(text, at) {
				return true
			}
		}
	}
	return false
}

// startKeepers starts three of them.
func startKeepers(t *testing.T) string {
	var addrs []string
	for i := range 3 {
		k := &keeper{name: fmt.Sprintf("thing_%d", i), kept: make(map[string]bool)}
		addrs = append(addrs, serveRaw(t, k.ServeHTTP))
	}
	return "kv_router " + strings.Join(addrs, " ")
}

// formOf returns a form with fields, and with a file at its end or its beginning.
func formOf(t *testing.T, file string, fileFirst bool, fields ...string) (kind, body string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	write := func() {
		to, err := w.CreateFormFile("file", "a.wav")
		if err == nil {
			_, err = io.WriteString(to, file)
		}
		noError(t, err)
	}
	if fileFirst {
		write()
	}
	for i := 0; i+1 < len(fields); i += 2 {
		noError(t, w.WriteField(fields[i], fields[i+1]))
	}
	if !fileFirst {
		write()
	}
	w.Close()
	return w.FormDataContentType(), b.String()
}

// TestWhatEnginesKeepIsFoundAgain makes things in engines, and names them in later requests.
func TestWhatEnginesKeepIsFoundAgain(t *testing.T) {
	site := startKeepers(t)
	s := startCaddy(t, site)
	kind, form := formOf(t, strings.Repeat("x", 200_000), false, "model", "m", "prompt", "a cat")
	for _, v := range []struct {
		name, path, kind, body string
		later                  []string // method, path and body; % is the id
	}{
		{"Videos", "/v1/videos", "application/json", `{"model":"m","prompt":"a cat"}`, []string{
			"GET /v1/videos/%", "GET /v1/videos/%/content?variant=video", "POST /v1/videos/%/remix {\"prompt\":\"a dog\"}",
			"POST /v1/videos/edits {\"video\":{\"id\":\"%\"}}", "HEAD /v1/videos/%", "DELETE /v1/videos/%",
		}},
		{"VideosByForm", "/v1/videos", kind, form, []string{"GET /v1/videos/%", "GET /v1/videos/%/content"}},
		{"Files", "/v1/files", kind, form, []string{"GET /v1/files/%", "GET /v1/files/%/content", `POST /v1/batches {"input_file_id":"%"}`}},
		{"Batches", "/v1/batches", "application/json", `{"input_file_id":"unknown"}`, []string{"GET /v1/batches/%", "POST /v1/batches/%/cancel {}"}},
		{"Conversations", "/v1/conversations", "application/json", `{}`, []string{
			"GET /v1/conversations/%", `POST /v1/conversations/%/items {"items":[]}`,
			`POST /v1/responses {"model":"m","input":"x","conversation":"%"}`,
			`POST /v1/responses {"model":"m","input":"x","conversation":{"id":"%"}}`,
		}},
		{"Voices", "/v1/audio/voices", kind, form, []string{`POST /v1/audio/speech {"model":"m","input":"x","voice":"%"}`, "DELETE /v1/audio/voices/%"}},
		{"Others", "/jobs", "application/json", `{}`, []string{"GET /jobs/%", "GET /results?id=%", "PATCH /jobs/% {}", "POST /jobs/%:cancel"}},
	} {
		t.Run(v.name, func(t *testing.T) {
			for i := range 6 {
				if i == 5 { // the pool survives it
					s.mustReload(t, site+"\n# again")
				}
				a := s.sendBy(t, http.MethodPost, v.path, v.body, "Content-Type", v.kind)
				id := ""
				for _, at := range []string{"id", "voice.name", "task.job_id"} {
					id += gjson.GetBytes(a.body, at).Str
				}
				if a.status != http.StatusOK || id == "" {
					t.Fatalf("status %d, %s", a.status, a.body)
				}
				for _, later := range v.later {
					method, target, _ := strings.Cut(strings.ReplaceAll(later, "%", id), " ")
					target, body, _ := strings.Cut(target, " ")
					if a := s.sendBy(t, method, target, body); a.status != http.StatusOK {
						t.Errorf("%s %s %s: status %d, %s", method, target, body, a.status, a.body)
					}
				}
			}
		})
	}
	if a := s.sendBy(t, http.MethodGet, "/v1/videos/unknown", ""); a.status != http.StatusNotFound {
		t.Errorf("an unknown one: status %d", a.status)
	}
	s.booksAtZero(t)
}

// TestAnEngineThatKeepsIsAway names something of an engine that cannot be reached now.
func TestAnEngineThatKeepsIsAway(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	for _, e := range engines {
		e.SetHandler(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"id":"video_%s"}`, e.Name())
		})
	}
	s := startCaddy(t, route(engines))
	id := gjson.GetBytes(s.sendBy(t, http.MethodPost, "/v1/videos", `{"prompt":"a cat"}`).body, "id").Str
	for _, e := range engines {
		if strings.HasSuffix(id, e.Name()) {
			e.Kill()
		}
	}
	a := s.sendBy(t, http.MethodGet, "/v1/videos/"+id, "")
	wantError(t, "GET", a, http.StatusServiceUnavailable, "no_worker", "which keeps what the request names")
}

// TestRequestsThatMeanAllEngines has three engines, one of which answers otherwise, and one that is away.
func TestRequestsThatMeanAllEngines(t *testing.T) {
	answers := []string{`{"success": true, "message":"done"}`, `{"success": false, "message":"one failed" }`, "Cache flushed.\n"}
	var engines []*recorder
	for i := range 3 {
		e := startRecorder(t, []string{"a", "b", "b"}[i], func(w http.ResponseWriter, r *http.Request, _ string) {
			if i == 1 && r.Header.Get("X-Fails") != "" {
				w.WriteHeader(http.StatusBadRequest)
			}
			io.WriteString(w, answers[i])
		})
		engines = append(engines, e)
	}
	s := startCaddy(t, route(engines, "max_body 1MiB", numbered(engines), trust("pins")))
	eventually(t, "the models to be known", func() bool { return len(s.models(t)) == 2 })
	received := func(path string) (got [3]int, body string) {
		for i, e := range engines {
			e.mu.Lock()
			for _, r := range e.got {
				if r.path == path {
					got[i]++
					body += r.body + ";"
				}
			}
			e.mu.Unlock()
		}
		return got, body
	}
	type part struct {
		Worker uint64
		Status int
		Answer json.RawMessage
		Error  string
	}
	for _, v := range []struct {
		method, path, body string
		header             []string
		status             int
		want               [3]int
	}{
		{"POST", "/abort_request", `{"rid":"r1"}`, nil, 200, [3]int{1, 1, 1}},
		{"POST", "/pause_generation", `{}`, []string{"X-Fails", "1"}, 400, [3]int{1, 1, 1}},
		{"POST", "/continue_generation", "", nil, 200, [3]int{1, 1, 1}},
		{"GET", "/flush_cache", "", nil, 200, [3]int{1, 1, 1}},
		{"POST", "/reset_prefix_cache", "", []string{"Content-Type", ""}, 200, [3]int{1, 1, 1}},
		{"POST", "/v1/load_lora_adapter", `{"lora_name":"x","lora_path":"/x"}`, []string{"Content-Type", "application/x-www-form-urlencoded"}, 200, [3]int{1, 1, 1}},
		{"POST", "/v1/unload_lora_adapter?model=b", `{"lora_name":"x"}`, nil, 200, [3]int{0, 1, 1}},
		{"POST", "/update_weights_from_disk", `{"model_path":"/x"}`, []string{"X-Fails", "1"}, 400, [3]int{1, 1, 1}},
		{"PUT", "/start_profile", `{}`, nil, 200, [3]int{1, 1, 1}},
		{"POST", "/sleep?level=1", "", append([]string{"X-Dynamo-Worker-Instance-Id", "2"}, trusted...), 200, [3]int{0, 1, 0}},
		{"HEAD", "/flush_cache", "", nil, 200, [3]int{}}, // to one: see below
		{"POST", "/init_weights_update_group", `{"rank_offset":1}`, nil, 200, [3]int{}},
	} {
		path, _, _ := strings.Cut(v.path, "?")
		before, _ := received(path)
		a := s.sendBy(t, v.method, v.path, v.body, v.header...)
		got, bodies := received(path)
		n := 0
		for i := range got {
			got[i] -= before[i]
			n += got[i]
		}
		if a.status != v.status || got != v.want && (v.want != [3]int{} || n != 1) {
			t.Errorf("%s %s: status %d, the engines got %v: %s", v.method, v.path, a.status, got, a.body)
		}
		if v.body != "" && strings.Count(bodies, v.body) != n {
			t.Errorf("%s %s: they got %s", v.method, v.path, bodies)
		}
		if n != 3 {
			continue
		}
		var joined struct {
			Success *bool
			Message string
			Workers []part
		}
		if err := json.Unmarshal(a.body, &joined); err != nil || len(joined.Workers) != 3 || a.header.Get("Content-Type") != "application/json" {
			t.Fatalf("%s: %v, %s", v.path, err, a.body)
		}
		if v.status == 400 && (joined.Success == nil || *joined.Success || joined.Message != "one failed") {
			t.Errorf("%s: the worst answer does not show: %s", v.path, a.body)
		}
		for _, w := range joined.Workers {
			text, _ := json.Marshal(strings.TrimSpace(answers[w.Worker-1]))
			if w.Worker < 3 {
				text = []byte(strings.TrimSpace(answers[w.Worker-1]))
			}
			if w.Status != 200 && w.Worker != 2 || w.Error != "" || compacted(w.Answer) != compacted(text) {
				t.Errorf("%s: worker %d: %+v", v.path, w.Worker, w)
			}
		}
	}
	long := `{"x":"` + strings.Repeat("x", 2<<20) + `"}`
	wantError(t, "a body that is too long", s.sendBy(t, "POST", "/update_weights_from_tensor", long), 413, "body_unreadable", "must go to all engines")

	engines[0].stop()
	a := s.sendBy(t, "POST", "/flush_cache", "")
	if first := gjson.GetBytes(a.body, "workers.#(worker==1)"); a.status != http.StatusBadGateway || first.Get("status").Int() != 502 ||
		!strings.Contains(first.Get("error").Str, "did not answer") || gjson.GetBytes(a.body, "workers.#").Int() != 3 {
		t.Errorf("with a dead worker: status %d, %s", a.status, a.body)
	}
	s.booksAtZero(t)
	for _, w := range s.workers(t)[1:] {
		if w.Health.ErrorsApart || w.Health.Failures > 0 {
			t.Errorf("%s is blamed: %+v", w.Dial, w.Health)
		}
	}
}

func compacted(b []byte) string {
	var to bytes.Buffer
	_ = json.Compact(&to, b)
	return to.String()
}

// TestFormsGoToTheEngineOfTheirModel has an engine for chats, and two for sounds, of which one has another
// model, beside one that knows no sounds.
func TestFormsGoToTheEngineOfTheirModel(t *testing.T) {
	start := func(model string, hears bool) *recorder {
		return startRecorder(t, model, func(w http.ResponseWriter, r *http.Request, body string) {
			w.Header().Set("Content-Type", "application/json")
			switch asked := strings.Contains(body+r.URL.Query().Get("model"), model); {
			case !hears && strings.HasPrefix(r.URL.Path, "/v1/audio/"):
				w.WriteHeader(http.StatusNotFound)
				io.WriteString(w, `{"detail":"Not Found"}`)
			case asked, model == "whisper-1" && strings.Contains(body, "alias"):
				io.WriteString(w, `{"text":"hello"}`)
			default:
				w.WriteHeader(http.StatusNotFound)
				io.WriteString(w, `{"error":{"message":"The model does not exist.","type":"NotFoundError","code":404}}`)
			}
		})
	}
	engines := []*recorder{start("org/chat", false), start("whisper-1", true), start("org/whisper", true)}
	s := startCaddy(t, route(engines))
	eventually(t, "the models to be known", func() bool { return len(s.models(t)) == 3 })
	short, long := strings.Repeat("RIFF", 10), strings.Repeat("RIFF\r\n--", 40_000)
	for _, v := range []struct {
		name, path, model, file string
		last                    bool
		want                    int // the only engine that is asked; -1: any
	}{
		{"First", "/v1/audio/transcriptions", "whisper-1", long, false, 1},
		{"Last", "/v1/audio/transcriptions", "org/whisper", long, true, 2},
		{"Short", "/v1/audio/translations", "whisper-1", short, true, 1},
		{"Images", "/v1/images/edits", "org/chat", long, false, 0},
		{"Unlisted", "/v1/audio/transcriptions", "alias", long, false, -1},
		{"UnlistedAndShort", "/v1/audio/transcriptions", "alias", short, true, -1},
	} {
		t.Run(v.name, func(t *testing.T) {
			for range 6 {
				time.Sleep(50 * time.Millisecond) // the budget for retries is not to be spent
				kind, body := formOf(t, v.file, v.last, "model", v.model)
				before := [3]int{}
				for i, e := range engines {
					before[i] = e.count()
				}
				if a := s.sendBy(t, http.MethodPost, v.path, body, "Content-Type", kind); a.status != http.StatusOK {
					t.Errorf("status %d, %s", a.status, a.body)
				}
				for i, e := range engines {
					if e.count() != before[i] && v.want >= 0 && i != v.want {
						t.Errorf("engine %d was asked", i)
					}
				}
			}
		})
	}
	for range 6 {
		if a := s.sendBy(t, http.MethodGet, "/v1/realtime?model=org%2Fwhisper", ""); a.status != http.StatusOK {
			t.Errorf("by the query: status %d, %s", a.status, a.body)
		}
	}
	// an alias that nobody has, and a path that nobody has
	for _, model := range []string{"none", ""} {
		kind, body := formOf(t, short, true, "model", model)
		if a := s.sendBy(t, http.MethodPost, "/v1/audio/transcriptions", body, "Content-Type", kind); a.status != http.StatusNotFound {
			t.Errorf("%q: status %d", model, a.status)
		}
	}
	for _, w := range s.workers(t) {
		if w.Health.ErrorsApart || w.Health.Failures > 0 || !w.Health.Available {
			t.Errorf("%s is blamed: %+v", w.Dial, w.Health)
		}
	}
	s.booksAtZero(t)
}

// recorder is an engine that lists one model, and notes what it gets of clients.
type recorder struct {
	*fake
	mu  sync.Mutex
	got []struct{ path, body string }
}

func startRecorder(t *testing.T, model string, answer func(w http.ResponseWriter, r *http.Request, body string)) *recorder {
	t.Helper()
	e := new(recorder)
	e.fake = startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case r.URL.Path == "/v1/models" && r.Method == http.MethodGet:
			lists(model)(w, r)
		case r.UserAgent() == "kv_router":
			http.NotFound(w, r)
		default:
			body, _ := io.ReadAll(r.Body)
			e.mu.Lock()
			e.got = append(e.got, struct{ path, body string }{r.URL.Path, string(body)})
			e.mu.Unlock()
			answer(w, r, string(body))
		}
		return true
	})
	return e
}

func (e *recorder) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.got)
}
