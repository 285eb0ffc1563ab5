package response

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// namedAnswer returns what the client gets of an answer that comes in pieces. If it is not read, it is one to a request
// for no known API.
func namedAnswer(t testing.TB, kind, sent string, size int, read bool) string {
	t.Helper()
	o := Options{Listener: nobody{}, Name: `my "m"`, NameAt: "model"}
	if read {
		req, err := api.Parse(api.For("/v1/chat/completions"), []byte(testRequest), api.Options{})
		if err != nil {
			t.Fatal(err)
		}
		o.Request, o.Stream = req, kind == "text/event-stream"
	}
	resp := &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {kind}},
		Body: io.NopCloser(inPieces{strings.NewReader(sent), size}), ContentLength: -1,
	}
	if size != 7 && kind != "text/event-stream" {
		resp.ContentLength = int64(len(sent))
		resp.Header.Set("Content-Length", strconv.Itoa(len(sent)))
	}
	got, err := io.ReadAll(NewBody(resp, o))
	if err != nil {
		got = fmt.Append(got, err) // of a stream that lacks its end
	}
	if length := resp.Header.Get("Content-Length"); length != "" && (length != strconv.Itoa(len(got)) || resp.ContentLength != int64(len(got))) {
		t.Errorf("%d bytes of %s", len(got), length)
	}
	return string(got)
}

// inPieces is read in pieces of a size.
type inPieces struct {
	io.Reader
	size int
}

func (p inPieces) Read(b []byte) (int, error) { return p.Reader.Read(b[:min(len(b), p.size)]) }

// TestAnswersHaveThePublicName renames the model where an answer names it, and nowhere else.
func TestAnswersHaveThePublicName(t *testing.T) {
	const ours = `"my \"m\""`
	for _, v := range []struct{ kind, sent, want string }{
		{"application/json", `{"id":"model","model" : "engine","choices":[{"model":"engine"}]}`, `{"id":"model","model" : ` + ours + `,"choices":[{"model":"engine"}]}`},
		{"application/json", `{"data":[` + strings.Repeat(`{"model":"x"},`, 3000) + `1],"model":"engine"} `, `{"data":[` + strings.Repeat(`{"model":"x"},`, 3000) + `1],"model":` + ours + `} `},
		{"application/json", `{"m\u006fdel":"engine"}`, `{"m\u006fdel":` + ours + `}`},
		{"application/json", `{"choices":[{"message":{"content":"\"model\":\"engine\""}}],"usage":{"model":"engine"}}`, ""},
		{"application/json", `{"model":null,"error":{"model":"engine"}}`, ""},
		{"application/json", `{"model":"engi`, ""},
		{"application/json", `[{"model":"engine"}]`, ""},
		{"application/json", "", ""},
		{"text/plain", `{"model":"engine"}`, ""},
		{
			"text/event-stream", ": hi\n\ndata: {\"model\":\"engine\",\"choices\":[{\"delta\":{\"content\":\"\\\"model\\\":\\\"engine\\\"\"}}]}\r\n\r\ndata: [DONE]\n\n",
			": hi\n\ndata: {\"model\":" + ours + ",\"choices\":[{\"delta\":{\"content\":\"\\\"model\\\":\\\"engine\\\"\"}}]}\r\n\r\ndata: [DONE]\n\n",
		},
		{
			"text/event-stream", "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"1\",\"model\":\"engine\"}}\n\ndata: {\"delta\":{\"model\":\"engine\"}}\n\n",
			"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"1\",\"model\":" + ours + "}}\n\ndata: {\"delta\":{\"model\":\"engine\"}}\n\n",
		},
		{"text/event-stream", "data: {\"response\":{\"output\":[{\"model\":\"x\"}],\"model\":\"engine\"}}\n\n", "data: {\"response\":{\"output\":[{\"model\":\"x\"}],\"model\":" + ours + "}}\n\n"},
		{"text/event-stream", "data:   {\"model\":\"engine\"}\n\n", "data:   {\"model\":" + ours + "}\n\n"},
		{"text/event-stream", "data: {\"model\":\"engine\"}", "data: {\"model\":" + ours + "}"},
	} {
		if v.want == "" {
			v.want = v.sent
		}
		for _, size := range []int{1, 7, 1 << 20} {
			for _, read := range []bool{false, true} {
				if got := namedAnswer(t, v.kind, v.sent, size, read); !strings.HasPrefix(got, v.want) || !read && got != v.want {
					t.Errorf("%s %.99s, in pieces of %d, read %v:\n%.300s\nwant\n%.300s", v.kind, v.sent, size, read, got, v.want)
				}
			}
		}
	}
}

// TestRenamedAnswersAreNotVouchedFor renames answers whose header describes their bytes, and one without a name.
func TestRenamedAnswersAreNotVouchedFor(t *testing.T) {
	for sent, kept := range map[string]int{`{"model":"engine"}`: 1, `{"id":"x"}`: 6} {
		resp := &http.Response{Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(sent)), ContentLength: -1}
		for _, name := range []string{"ETag", "Content-MD5", "Digest", "Content-Digest", "Accept-Ranges"} {
			resp.Header.Set(name, "x")
		}
		NewBody(resp, Options{Listener: nobody{}, Name: "m", NameAt: "model"})
		if length := resp.Header.Get("Content-Length"); len(resp.Header) != kept || length != "" && length != strconv.FormatInt(resp.ContentLength, 10) {
			t.Errorf("%s: %v", sent, resp.Header)
		}
	}
}

// TestTheNameIsNotAwaited has the part of a plain answer behind the name pass at once.
func TestTheNameIsNotAwaited(t *testing.T) {
	from, to := io.Pipe()
	go fmt.Fprint(to, `{"model":"engine","data":[1`)
	b := NewBody(&http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: from, ContentLength: -1}, Options{Listener: nobody{}, Name: "m", NameAt: "model"})
	p := make([]byte, 99)
	if n, err := b.Read(p); err != nil || string(p[:n]) != `{"model":"m","data":[1` {
		t.Errorf("%v, %q", err, p[:n])
	}
	go to.CloseWithError(iotest.ErrTimeout)
	if _, err := b.Read(p); err == nil {
		t.Error("the end is lost")
	}
}

// FuzzNames has the same answer come in pieces and as a whole, and compares all that is no name.
func FuzzNames(f *testing.F) {
	for _, sent := range []string{
		`{"a":{"model":"x"},"model":"engine"}`, "data: {\"model\":\"e\"}\n\ndata: {\"message\":{\"model\":\"e\"}}\n\n", `{"model":"a","model":"b"}`,
		"\xef\xbb\xbf{\"response\":{},\"model\":\"\\\"\"}", "data: {\"model\":\ndata: \"e\"}\r\r", "data:{\"model\":\"e\"}\r\n\r\n: x\n\n",
	} {
		f.Add(sent, 3, true)
		f.Add("data:  "+sent+"\n\n", 3, true)
		f.Add(sent, 5, false)
	}
	f.Fuzz(func(t *testing.T, sent string, size int, stream bool) {
		kind := "application/json"
		if stream {
			kind = "text/event-stream"
		}
		if a, b := namedAnswer(t, kind, sent, 1<<20, true), namedAnswer(t, kind, sent, 1+(size&63), true); a != b {
			t.Fatalf("read as a whole %q, in pieces %q", a, b)
		}
		whole := namedAnswer(t, kind, sent, 1<<20, false)
		if got := namedAnswer(t, kind, sent, 1+(size&63), false); got != whole {
			t.Fatalf("in pieces %q, as a whole %q", got, whole)
		}
		if again := namedAnswer(t, kind, whole, 1<<20, false); again != whole {
			t.Fatalf("renamed again: %q, once: %q", again, whole)
		}
		if stream {
			return
		}
		want := sent
		if at := api.NameIn([]byte(sent), "model"); at.Len() > 0 {
			want = string(rawjson.Splice(nil, []byte(sent), []rawjson.Edit{{Span: at, Text: []byte(`"my \"m\""`)}}))
		}
		if whole != want {
			t.Fatalf("got %q, want %q", whole, want)
		}
	})
}

// BenchmarkNames reads answers as they come from a connection, without and with a public name.
func BenchmarkNames(b *testing.B) {
	const head = `{"id":"chatcmpl-5f3a9c0d7e","object":"chat.completion.chunk","created":1763700000,"model":"engine","choices":[{"index":0,`
	chunk := "data: " + head + `"delta":{"content":" word"},"finish_reason":null}]}` + "\n\n"
	plain := head + `"message":{"role":"assistant","content":"` + strings.Repeat("word ", 60) + `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":256,"completion_tokens":60}}`
	req, err := api.Parse(api.For("/v1/chat/completions"), []byte(testRequest), api.Options{})
	if err != nil {
		b.Fatal(err)
	}
	p := make([]byte, 32<<10)
	for _, v := range []struct {
		name, kind, sent string
		size             int
	}{
		{"Plain", "application/json", plain, 32 << 10},
		{"Stream", "text/event-stream", strings.Repeat(chunk, 100) + testEnd, len(chunk)},
		{"StreamInLongReads", "text/event-stream", strings.Repeat(chunk, 100) + testEnd, 32 << 10},
	} {
		for _, name := range []string{"", "public"} {
			b.Run(v.name+"/"+name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					resp := &http.Response{
						StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {v.kind}},
						Body: io.NopCloser(inPieces{strings.NewReader(v.sent), v.size}), ContentLength: int64(len(v.sent)),
					}
					body := NewBody(resp, Options{Request: req, Stream: v.name != "Plain", Listener: nobody{}, Name: name, NameAt: "model"})
					for {
						if _, err := body.Read(p); err != nil {
							break
						}
					}
				}
			})
		}
	}
}
