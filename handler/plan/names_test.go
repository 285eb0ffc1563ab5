package plan

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// knowing returns a reader of a pool that lists and keeps these names.
func knowing(models, ids string, voices ...string) *Reader {
	rd := testReader(0)
	rd.Lists = func(model string) bool { return slices.Contains(strings.Fields(models), model) }
	for i, v := range voices {
		voices[i] = engine.Voice(v)
	}
	rd.Keeps = func(id string) bool { return slices.Contains(append(strings.Fields(ids), voices...), id) }
	return rd
}

// formOf returns a form of fields, "name=value". A field with an @ before its value is a file.
func formOf(t testing.TB, fields ...string) (kind string, body []byte) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for _, f := range fields {
		name, value, _ := strings.Cut(f, "=")
		var err error
		if file, ok := strings.CutPrefix(value, "@"); ok {
			var to io.Writer
			if to, err = w.CreateFormFile(name, "a.wav"); err == nil {
				_, err = io.WriteString(to, file)
			}
		} else {
			err = w.WriteField(name, value)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	return w.FormDataContentType(), b.Bytes()
}

// TestWhatNamesTheEngine has the names of models and ids in all places of requests for no known API.
func TestWhatNamesTheEngine(t *testing.T) {
	rd := knowing("org/chat gpt-4o whisper-1 base:adapter", "resp_1 video_1 job:2 voice_3 conv_1 file-1", "bob")
	for _, v := range []struct{ request, kind, body, model, id string }{
		{"GET /v1/responses/resp_1", "", "", "", "resp_1"},
		{"GET /v1/responses/resp_1/input_items?after=x", "", "", "", "resp_1"},
		{"POST /openai/v1/responses/resp_1/cancel", "", "", "", "resp_1"},
		{"GET /v1/responses/resp_2", "", "", "", ""},
		{"GET /v1/videos/video_1/content?variant=thumbnail", "", "", "", "video_1"},
		{"DELETE /v1/videos/video_1", "", "", "", "video_1"},
		{"POST /v1/videos/video_1/remix", "application/json", `{"prompt":"a dog"}`, "", "video_1"},
		{"PATCH /v1/jobs/job:2", "application/json", `{}`, "", "job:2"},
		{"POST /v1/jobs/video_1:cancel", "", "", "", "video_1"},
		{"GET /v1/videos?id=video_1", "", "", "", "video_1"},
		{"POST /v1/videos/edits", "application/json", `{"video":{"id":"video_1"},"model":"gpt-4o"}`, "gpt-4o", "video_1"},
		{"POST /v1/audio/speech", "application/json", `{"model":"whisper-1","input":"job:2","voice":"voice_3"}`, "whisper-1", "voice_3"},
		{"POST /v1/audio/speech", "application/json", `{"voice":{"id":"voice_3"}}`, "", "voice_3"},
		{"POST /v1/audio/speech", "application/json", `{"voice":"bob","model":"m"}`, "m", "voice bob"},
		{"DELETE /v1/audio/voices/bob", "", "", "", "voice bob"},
		{"GET /v1/files/bob", "", "", "", ""}, // whatever clients call their voices
		{"GET /video_1/files", "", "", "", ""},
		{"POST /v1/batches", "application/json", `{"input_file_id":"file-1"}`, "", "file-1"},
		{"POST /v1/responses", "application/json", `{"model":"m","input":"x","conversation":"conv_1"}`, "m", "conv_1"},
		{"POST /v1/responses", "application/json", `{"model":"m","input":"x","conversation":{"id":"conv_1"}}`, "m", "conv_1"},
		{"POST /v1/responses", "application/json", `{"model":"m","input":"x","conversation":"conv_2"}`, "m", ""},
		{"POST /v1/chat/completions", "application/json", `{"messages":[{"role":"user","content":"video_1"}]}`, "", ""},
		{"GET /v1/realtime?model=org%2Fchat", "", "", "org/chat", ""},
		{"GET /v1/realtime?x=y", "", "", "", ""},
		{"POST /v1/any?model=a", "application/json", `{"model":"b"}`, "b", ""},
		{"GET /v1/models/org/chat", "", "", "org/chat", ""},
		{"GET /v1/models/org%2Fother", "", "", "org/other", ""},
		{"DELETE /v1/models/org/chat", "", "", "org/chat", ""},
		{"DELETE /v1/models/org/other", "", "", "", ""},
		{"GET /v1/models", "", "", "", ""},
		{"POST /v2/models/org/chat/versions/1/infer", "", "", "org/chat", ""},
		{"POST /v1/models/gpt-4o:predict", "", "", "gpt-4o", ""},
		{"POST /v1/models/base:adapter:predict", "", "", "base:adapter", ""},
		{"POST /openai/deployments/whisper-1/audio/transcriptions", "audio/wav", "x", "whisper-1", ""},
		{"POST /openai/deployments/gpt-4o/chat/completions?api-version=1", "application/json", `{"messages":[]}`, "gpt-4o", ""},
		{"POST /openai/deployments/gpt-4o/chat/completions", "application/json", `{"model":"m","messages":[]}`, "m", ""},
		{"POST /gpt-4o", "", "", "", ""}, // the first segment is the API's
		{"POST /v1/audio/transcriptions", "application/x-www-form-urlencoded", "a=b&model=org%2Fchat&video_id=video_1", "org/chat", "video_1"},
		{"POST /v1/audio/transcriptions", "multipart/form-data", "model", "", ""}, // without a boundary
		{"POST /v1/audio/transcriptions", "audio/wav", "model=org/chat", "", ""},
	} {
		method, target, _ := strings.Cut(v.request, " ")
		r := httptest.NewRequest(method, target, strings.NewReader(v.body))
		r.Header.Set("Content-Type", v.kind)
		p, err := rd.Read(r)
		if err != nil {
			t.Errorf("%s: %v", v.request, err)
			continue
		}
		if p.Model != v.model || p.Response != v.id {
			t.Errorf("%s %s: model %q, id %q, want %q, %q", v.request, v.body, p.Model, p.Response, v.model, v.id)
		}
		p.Close()
	}
}

// TestFormsAreReadAsFarAsNeeded has the model before and behind a file, in forms of all lengths. What is
// not in memory is streamed. All arrives as it was sent.
func TestFormsAreReadAsFarAsNeeded(t *testing.T) {
	sound := func(n int) string { return "file=@" + strings.Repeat("\r\n--sound", n/9) }
	for _, v := range []struct {
		name          string
		fields        []string
		model, id     string
		whole, closed bool // whether all is in memory; whether there is no memory
	}{
		{name: "Short", fields: []string{sound(100), "model=listed"}, model: "listed", whole: true},
		{name: "ModelFirst", fields: []string{"model=listed", sound(500_000)}, model: "listed"},
		{name: "ModelLast", fields: []string{"x=y", sound(500_000), "model=listed"}, model: "listed", whole: true},
		{name: "Unlisted", fields: []string{"model=whisper-2", sound(500_000)}, model: "whisper-2", whole: true},
		{name: "None", fields: []string{sound(500_000)}, whole: true},
		{name: "Voice", fields: []string{"voice=voice_3", sound(500_000)}, id: "voice_3"},
		{name: "TooLong", fields: []string{"model=unlisted", sound(2 << 20)}, model: "unlisted"},
		{name: "TooLongAndLast", fields: []string{sound(2 << 20), "model=listed"}},
		{name: "NoMemory", fields: []string{"model=unlisted", sound(700_000)}, model: "unlisted", closed: true},
		{name: "FileOfThatName", fields: []string{"model=@weights", sound(100), "model=listed"}, model: "listed", whole: true},
		{name: "Twice", fields: []string{"model=listed", "model=other"}, model: "listed", whole: true},
		{name: "LongName", fields: []string{"model=" + strings.Repeat("m", maxName+1)}, whole: true},
		{name: "Nothing", whole: true},
	} {
		for _, chunked := range []bool{false, true} {
			rd := knowing("listed", "voice_3")
			if v.closed {
				rd.Memory.Held.Store(body.MaxBytes())
			}
			kind, sent := formOf(t, v.fields...)
			r := httptest.NewRequest(http.MethodPost, "/v1/audio/transcriptions", bytes.NewReader(sent))
			r.Header.Set("Content-Type", kind)
			if chunked {
				r.ContentLength = -1
			}
			before := rd.Memory.Held.Load()
			p, err := rd.Read(r)
			if err != nil {
				t.Fatalf("%s: %v", v.name, err)
			}
			if p.Model != v.model || p.Response != v.id || (p.Body != nil) != v.whole {
				t.Errorf("%s: model %q, id %q, in memory: %v", v.name, p.Model, p.Response, p.Body != nil)
			}
			var got []byte
			if p.Body != nil {
				got = p.Body.Data
			} else if got, err = io.ReadAll(p.Once); err != nil {
				t.Errorf("%s: %v", v.name, err)
			}
			if !bytes.Equal(got, sent) {
				t.Errorf("%s: %d of %d bytes arrive", v.name, len(got), len(sent))
			}
			if p.Close(); rd.Memory.Held.Load() != before {
				t.Errorf("%s: %d bytes stay counted", v.name, rd.Memory.Held.Load()-before)
			}
		}
	}
}

// FuzzForm reads anything as a form, cut anywhere. What names a model in a whole form is found, as
// mime/multipart reads it.
func FuzzForm(f *testing.F) {
	for _, fields := range [][]string{{"model=m", "file=@sound"}, {"file=@--b", "a=b", "model=org/chat"}, {"model=@x"}} {
		kind, b := formOf(f, fields...)
		f.Add(kind, b, uint16(60_000))
		f.Add(kind, b, uint16(len(b)/2))
	}
	f.Add("application/x-www-form-urlencoded", []byte("model=m&x=%zz"), uint16(9))
	f.Fuzz(func(t *testing.T, kind string, form []byte, cut uint16) {
		request := func(b []byte) *http.Request {
			r := httptest.NewRequest(http.MethodPost, "/v1/audio/transcriptions", bytes.NewReader(b))
			r.Header.Set("Content-Type", kind)
			return r
		}
		want := ""
		if whole := request(form); whole.ParseMultipartForm(32<<20) == nil && len(whole.MultipartForm.Value["model"]) == 1 {
			want = whole.MultipartForm.Value["model"][0]
		}
		for _, b := range [][]byte{form, form[:min(len(form), int(cut))]} {
			p := new(Plan)
			knowing("", "").nameForm(request(b), p, b)
			if len(b) == len(form) && want != "" && len(want) <= maxKept && strings.Count(string(form), "name=") < maxFields && p.Model != want {
				t.Errorf("model %q, want %q", p.Model, want)
			}
			if len(p.Model) > maxName {
				t.Errorf("a name of %d bytes", len(p.Model))
			}
		}
	})
}

// TestLongNamesAreKeptAsDigests sends model, salt and other names as long as a body. The
// router stores short digests of them, which still differ.
func TestLongNamesAreKeptAsDigests(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	a, b, c := &api.Request{Model: long, Salt: long}, &api.Request{Model: long + "y", Salt: long + "y"}, &api.Request{Model: "m", Salt: "s"}
	for _, r := range []*api.Request{a, b, c} {
		detach(r)
	}
	if len(a.Model) > 100 || len(a.Salt) > 100 || a.Model == b.Model || a.Salt == b.Salt || c.Model != "m" || c.Salt != "s" {
		t.Errorf("%.100s, %.100s, %+v", a.Model, b.Model, c)
	}
}

// TestSidesOfAModel has sessions keep their side, whichever router chooses it.
func TestSidesOfAModel(t *testing.T) {
	weight := func(n uint32) *uint32 { return &n }
	m := &PublicModel{Name: "m", To: []EngineModel{{"a", weight(9)}, {"none", weight(0)}, {Model: "b"}}}
	all := func(string) bool { return true }
	seen := map[string]int{}
	for key := range uint64(10_000) {
		seen[m.choose(key, all)]++
		if got := m.choose(key, func(model string) bool { return model == "none" }); got != "none" {
			t.Fatalf("%s serves nothing", got)
		}
		if got := m.choose(key, func(string) bool { return false }); got != "a" && got != m.choose(key, all) {
			t.Fatalf("without any, it is %s", got)
		}
	}
	if seen["none"] > 0 || seen["b"] < 880 || seen["b"] > 1120 {
		t.Errorf("of 10,000 sessions: %v", seen)
	}
	if got := m.choose(12, all) + m.choose(13, all) + m.choose(14, all) + m.choose(15, all) + m.choose(16, all) + m.choose(17, all); got != sidesBefore {
		t.Errorf("sides have changed: %s", got)
	}
}

const sidesBefore = "aabaaa"

// TestConversationsOpenTheSame has turns of one conversation have one opening, and others another.
func TestConversationsOpenTheSame(t *testing.T) {
	const first = `{"messages":[{"role":"user","content":"hi\n"}]}`
	same := []string{
		`{"messages":[{"role":"system","content":"now it is 3"},{"content":[{"type":"text","text":"hi\u000a","cache_control":{}}],"role":"user"},{"role":"assistant","content":"x"}]}`,
		`{"stream":true,"input":[{"role":"developer","content":"x"},{"role":"user","content":"hi\n"},{"role":"user","content":"y"}]}`,
		`{"input":"hi\n"}`, `{"prompt":["hi\n"]}`,
	}
	for _, body := range same {
		if api.Opening([]byte(body)) != api.Opening([]byte(first)) {
			t.Errorf("%s opens in another way", body)
		}
	}
	seen := map[uint64]string{}
	for _, body := range []string{
		first, `{"messages":[{"role":"user","content":"ho"}]}`, `{"messages":[]}`, `{"prompt":[1,2]}`, `{"prompt":[1,3]}`, `{"input":"x"}`, `no JSON`, "", `{"messages":`,
		fmt.Sprintf(`{"input":%q}`, strings.Repeat("a", 1000)), fmt.Sprintf(`{"input":%q}`, strings.Repeat("a", 1001)),
	} {
		sum := api.Opening([]byte(body))
		if other, has := seen[sum]; has {
			t.Errorf("%.40s opens as %.40s", body, other)
		}
		seen[sum] = body
	}
}

// FuzzModelInForm finds the model in forms of any bytes. It never finds another text.
func FuzzModelInForm(f *testing.F) {
	f.Add("multipart/form-data; boundary=b", "--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\nm\r\n--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n", "m")
	f.Fuzz(func(t *testing.T, kind, form, name string) {
		at := modelInForm(kind, []byte(form), name)
		if got := at.Of([]byte(form)); at.Len() > 0 && string(got) != name {
			t.Errorf("found %q", got)
		}
		_ = NameInPath(form, name).Of([]byte(form))
	})
}
