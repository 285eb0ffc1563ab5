package tests

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// heap returns the bytes in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestBodiesAreLetGoOnceAnswersBegin has active streams with large prompts, whose engine
// stores none of them. The router must not store them either. It has their hashes, so it
// may need more memory than reverse_proxy, but less than half of the prompts.
func TestBodiesAreLetGoOnceAnswersBegin(t *testing.T) {
	for _, size := range []int{3 << 20, 5 << 20} { // with memory that is used again, and without
		t.Run(fmt.Sprintf("%dMiB", size>>20), func(t *testing.T) {
			plain := heapOfStreams(t, "reverse_proxy", size, 0)
			ours := heapOfStreams(t, "kv_router", size, plain+streamsOfHeap*int64(size)/2)
			t.Logf("the heap grew by %d MiB, with reverse_proxy by %d MiB", ours>>20, plain>>20)
			if more, most := ours-plain, streamsOfHeap*int64(size)/2; more >= most {
				t.Errorf("%d MiB more than with reverse_proxy, want less than %d", more>>20, most>>20)
			}
		})
	}
}

// streamsOfHeap is the number of active streams of heapOfStreams.
const streamsOfHeap = 12

// heapOfStreams returns by how much the heap grows while streams with prompts
// of the given size are active. It returns the least value in two seconds, or
// the first one below enough, because memory is released soon after the header.
func heapOfStreams(t *testing.T, directive string, size int, enough int64) int64 {
	var begun atomic.Int64
	engine := serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.Method == http.MethodGet {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, oneChunk)
		http.NewResponseController(w).Flush()
		begun.Add(1)
		<-r.Context().Done()
	})
	s := startCaddy(t, directive+" "+engine)
	defer caddy.Stop()                     //nolint:errcheck // it is stopped again at the test's end
	s.get(t.Context(), s.url+"/v1/models") // what is made once is there
	body := ask(strings.Repeat("word ", size/5)).streamed().body()
	before := heap()
	ctx, leave := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer leave()
	for range streamsOfHeap {
		clients.Go(func() { s.post(ctx, "/v1/chat/completions", body) })
	}
	eventually(t, "all streams have begun", func() bool { return begun.Load() == streamsOfHeap })
	grown := heap() - before
	for deadline := time.Now().Add(2 * time.Second); grown >= enough && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		grown = min(grown, heap()-before)
	}
	return grown
}

// exchange is what both sides saw of one request.
type exchange struct {
	Status        int
	Informational []int
	Body          string
	Length        string
	Trailer       http.Header
	Err           error
	Seen          http.Header // by the engine: what it says in X-Seen headers
}

// echo answers with the request as it received it, with a 103 before and a trailer after.
func echo(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	h := w.Header()
	h.Set("X-Seen-Proto", r.Proto)
	h.Set("X-Seen-Request", r.Method+" "+r.RequestURI)
	h.Set("X-Seen-Expect", r.Header.Get("Expect"))
	h.Set("X-Seen-Idempotency-Key", fmt.Sprint(r.Header["Idempotency-Key"]))
	h.Set("X-Seen-Body", string(b))
	if r.Method == http.MethodHead {
		h.Set("Content-Length", "12345")
		return
	}
	h.Set("Link", "</style.css>")
	w.WriteHeader(http.StatusEarlyHints)
	h.Del("Link")
	h.Set("Trailer", "X-End")
	h.Set("Content-Type", "application/json")
	io.WriteString(w, `{"choices":[]}`)
	h.Set("X-End", "yes")
}

// exchange makes a request and returns what became of it.
func (s *server) exchange(ctx context.Context, method, path string, body io.Reader, prepare func(*http.Request)) exchange {
	var e exchange
	var mu sync.Mutex
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
		mu.Lock()
		defer mu.Unlock()
		if code != http.StatusContinue { // how many of these come is chance
			e.Informational = append(e.Informational, code)
		}
		return nil
	}})
	req, err := http.NewRequestWithContext(ctx, method, s.url+path, body)
	if err != nil {
		return exchange{Err: err}
	}
	prepare(req)
	resp, err := s.client.Do(req)
	if err != nil {
		return exchange{Err: err}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	mu.Lock()
	defer mu.Unlock()
	e.Status, e.Body, e.Err, e.Trailer = resp.StatusCode, string(b), err, resp.Trailer
	e.Length, e.Seen = resp.Header.Get("Content-Length"), make(http.Header)
	for name, values := range resp.Header {
		if strings.HasPrefix(name, "X-Seen-") {
			e.Seen[name] = values
		}
	}
	return e
}

// TestProtocolsAreAsWithReverseProxy covers rare parts of HTTP: trailers of answers,
// Expect, early answers, methods and paths that only resemble inferences, and engines with
// HTTP/2 without TLS. The results must equal those of reverse_proxy.
func TestProtocolsAreAsWithReverseProxy(t *testing.T) {
	var protos http.Protocols
	protos.SetUnencryptedHTTP2(true)
	protos.SetHTTP1(true)
	ln := listen(t)
	engine := &http.Server{Protocols: &protos, Handler: http.HandlerFunc(echo), ReadHeaderTimeout: time.Minute}
	go engine.Serve(ln)
	t.Cleanup(func() { engine.Close() })

	block := func(versions string) string {
		return fmt.Sprintf("reverse_proxy %s {\ntransport http {\nversions %s\n}\n}", ln.Addr(), versions)
	}
	var sites strings.Builder
	for name, versions := range map[string]string{"h1": "1.1", "h2c": "h2c 2"} {
		fmt.Fprintf(&sites, "handle_path /reverse_proxy/%s/* {\n%s\n}\nhandle_path /kv_router/%s/* {\nkv_router {\n%s\n}\n}\n", name, block(versions), name, block(versions))
	}
	s := startCaddy(t, sites.String())
	const chat = `{"messages":[{"role":"user","content":"x"}]}`
	for _, v := range []struct {
		name, method, path string
		body               string
		chunked            bool
		prepare            func(*http.Request)
		seen               string // a header that shows that the case is the case
		is                 string
	}{
		{"Chunked", "POST", "/v1/chat/completions", chat, true, nil, "X-Seen-Body", chat},
		{"Expect", "POST", "/v1/chat/completions", chat, false, func(r *http.Request) { r.Header.Set("Expect", "100-continue") }, "X-Seen-Body", chat},
		{"ExpectStreamedThrough", "POST", "/v1/audio/transcriptions", chat, false, func(r *http.Request) { r.Header.Set("Expect", "100-continue") }, "X-Seen-Body", chat},
		{"Head", "HEAD", "/v1/models", "", false, nil, "X-Seen-Body", ""},
		{"HeadOfAnInference", "HEAD", "/v1/chat/completions", "", false, nil, "X-Seen-Body", ""},
		{"GetWithAQuery", "GET", "/v1/responses/resp_1?include=x", "", false, nil, "X-Seen-Body", ""},
		{"Delete", "DELETE", "/v1/responses/resp_1", "", false, nil, "X-Seen-Body", ""},
		{"OtherPath", "POST", "/v1/threads/thread_1/messages", chat, false, nil, "X-Seen-Body", chat},
		{"NoJSON", "POST", "/v1/unknown", "not JSON", false, nil, "X-Seen-Body", "not JSON"},
		{"Options", "OPTIONS", "/v1/embeddings", "", false, nil, "X-Seen-Body", ""},
		{"Patch", "PATCH", "/v1/chat/completions", `{"model":"m"}`, false, nil, "X-Seen-Body", `{"model":"m"}`},
		{"UnknownMethod", "PROPFIND", "/generate", "", false, nil, "X-Seen-Body", ""},
		{"IdempotencyKey", "POST", "/v1/chat/completions", chat, false, func(r *http.Request) { r.Header.Set("Idempotency-Key", "k") }, "X-Seen-Idempotency-Key", "[k]"},
		{"NoIdempotencyKey", "POST", "/v1/chat/completions", chat, false, nil, "X-Seen-Idempotency-Key", "[]"},
	} {
		for _, version := range []string{"h1", "h2c"} {
			t.Run(v.name+"/"+version, func(t *testing.T) {
				got := make(map[string]exchange)
				for _, d := range directives {
					var body io.Reader = strings.NewReader(v.body)
					if v.chunked {
						body = io.MultiReader(body) // hides its length
					}
					prepare := v.prepare
					if prepare == nil {
						prepare = func(*http.Request) {}
					}
					got[d] = s.exchange(t.Context(), v.method, "/"+d+"/"+version+v.path, body, prepare)
				}
				plain, ours := got["reverse_proxy"], got["kv_router"]
				if !reflect.DeepEqual(ours, plain) {
					t.Errorf("got  %+v\nwant %+v", ours, plain)
				}
				if plain.Status != http.StatusOK || plain.Err != nil || plain.Seen.Get(v.seen) != v.is {
					t.Errorf("reverse_proxy itself: %+v; want %s %q", plain, v.seen, v.is)
				}
				if want := map[string]string{"h1": "HTTP/1.1", "h2c": "HTTP/2.0"}[version]; plain.Seen.Get("X-Seen-Proto") != want {
					t.Errorf("the engine saw %s, want %s", plain.Seen.Get("X-Seen-Proto"), want)
				}
				if v.method == http.MethodPost && (len(plain.Informational) == 0 || version == "h1" && plain.Trailer.Get("X-End") != "yes") {
					t.Errorf("reverse_proxy itself: 1xx %v, trailer %v", plain.Informational, plain.Trailer)
				}
				if v.method == http.MethodHead && plain.Length != "12345" {
					t.Errorf("reverse_proxy itself: length %q", plain.Length)
				}
			})
		}
	}
	s.booksAtZero(t)
}
