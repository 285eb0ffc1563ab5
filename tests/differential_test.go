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
	"testing"
	"time"
)

// arrival is a request as an upstream received it.
type arrival struct {
	At, Method, URI  string
	Length           int64
	TransferEncoding []string
	Header           http.Header
	Body             string
}

// arrivals are the complete requests, by the value of their X-Case.
type arrivals struct {
	mu   sync.Mutex
	list map[string][]arrival
}

// of returns those of one case.
func (a *arrivals) of(id string) []arrival {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.list[id]
}

// upstream starts one that answers all requests, after hold, and notes those with
// an X-Case.
func (a *arrivals) upstream(t *testing.T, name string, hold func(*http.Request)) (addr string) {
	return serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
		got := arrival{At: name, Method: r.Method, URI: r.RequestURI, Length: r.ContentLength, TransferEncoding: r.TransferEncoding}
		body, err := io.ReadAll(r.Body)
		if hold != nil {
			hold(r)
		}
		if id := r.Header.Get("X-Case"); id != "" && err == nil && r.Context().Err() == nil {
			got.Header, got.Body = r.Header.Clone(), string(body)
			for _, name := range []string{"Accept-Encoding", "X-Case", "X-Backup", "X-Tenant-Id"} {
				got.Header.Del(name)
			}
			a.mu.Lock()
			a.list[id] = append(a.list[id], got)
			a.mu.Unlock()
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"choices":[],"at":%q}`, name)
	})
}

// destination is a path with a body. What becomes of these differs in kv_router.
type destination struct {
	name, path, kind string
	begin, end       string // of the body
	read             bool   // the body is read into memory, if it fits
	inference        bool
}

var destinations = []destination{
	{"Inference", "/v1/chat/completions?a=%2F", "application/json", `{"stream":true,"model":"m","messages":[{"role":"user","content":"`, `"}]}`, true, true},
	{"NoJSON", "/v1/chat/completions", "text/plain", "some", "words", false, true},
	{"Other", "/tokenize", "application/json", `{"model":"m","prompt":"`, `"}`, true, false},
	{"OtherThatComputes", "/invocations", "text/plain", `{"model":"m","prompt":"`, `"}`, true, false},
	{"Sound", "/v1/audio/transcriptions", "audio/wav", "RIFF", "\x00", false, false},
}

// framing is how long a body is and how it is sent.
type framing struct {
	name    string
	size    int
	chunked bool
}

// fits returns whether the body is at most max_body long.
func (f framing) fits() bool { return f.size < 64<<10 }

var framings = []framing{
	{"Short", 1, false},
	{"Length", 5000, false},
	{"Chunked", 5000, true},
	{"EmptyChunked", 0, true},
	{"Long", 200_000, false},
	{"LongChunked", 200_000, true},
}

// pair is two handlers that must behave alike, each at the same place of its site.
type pair struct {
	name        string
	plain, ours string
	applies     func(destination, framing) bool // nil: to all
}

// proxies returns a pair of proxies with the same block.
func proxies(name, addr string, lines ...string) pair {
	block := "reverse_proxy " + addr + " {\n" + strings.Join(lines, "\n") + "\n}"
	return pair{name: name, plain: block, ours: router(name, block)}
}

// before returns a pair with a directive in front of both.
func before(directive string, p pair) pair {
	p.plain, p.ours = directive+"\n"+p.plain, directive+"\n"+p.ours
	return p
}

// refusing returns a pair of a router that refuses what reverse_proxy would not,
// and of a route that fails.
func refusing(name, addr string, applies func(destination, framing) bool, lines ...string) pair {
	return pair{name, "error 503", router(name, "reverse_proxy "+addr, lines...), applies}
}

// router returns a kv_router with a proxy's block.
func router(pool, block string, lines ...string) string {
	return fmt.Sprintf("kv_router {\npool %s\nmax_body 64KiB\n%s\n%s\n}", pool, strings.Join(lines, "\n"), block)
}

// places returns the directives of a site with all pairs. A backup gets the requests that
// fail. It stands behind a reverse_proxy or a kv_router.
func places(pairs []pair, backup string) string {
	var b strings.Builder
	for _, p := range pairs {
		fmt.Fprintf(&b, "handle_path /reverse_proxy/%s/* {\nroute {\n%s\n}\n}\nhandle_path /kv_router/%s/* {\nroute {\n%s\n}\n}\n", p.name, p.plain, p.name, p.ours)
	}
	fmt.Fprintf(&b, `handle_errors {
	uri path_regexp ^/(reverse_proxy|kv_router)/[a-z_]+/ /
	@routed header X-Backup kv_router
	handle @routed {
		%s
	}
	handle {
		reverse_proxy %s
	}
}
`, router("backup", "reverse_proxy "+backup), backup)
	return b.String()
}

// result is the client's view of a request.
type result struct {
	Status    int
	Body, Err string
	Seen      []arrival
}

// send sends a body to one of a pair.
func (s *server) sendTo(t *testing.T, seen *arrivals, id, path string, d destination, fr framing, header ...string) result {
	t.Helper()
	text := ""
	if fr.size > 0 {
		text = d.begin + strings.Repeat("a", fr.size) + d.end
	}
	var body io.Reader = strings.NewReader(text)
	if fr.chunked {
		body = io.MultiReader(body) // hides its length
	}
	a := s.request(t.Context(), http.MethodPost, path, body, append(header, "Content-Type", d.kind, "X-Case", id)...)
	return result{a.status, string(a.body), fmt.Sprint(a.err), seen.of(id)}
}

// compareAll sends each request to both of each pair that it applies to. Upstreams and
// clients must see the same.
func (s *server) compareAll(t *testing.T, seen *arrivals, pairs []pair, header ...string) {
	for _, p := range pairs {
		t.Run(p.name, func(t *testing.T) {
			for _, d := range destinations {
				for _, fr := range framings {
					if p.applies != nil && !p.applies(d, fr) {
						continue
					}
					for _, backup := range directives {
						var got [2]result
						for i, directive := range directives {
							id := strings.Join([]string{p.name, d.name, fr.name, backup, directive}, "/")
							got[i] = s.sendTo(t, seen, id, "/"+directive+"/"+p.name+d.path, d, fr, append(header, "X-Backup", backup)...)
						}
						if plain, ours := got[0], got[1]; !reflect.DeepEqual(ours, plain) {
							t.Errorf("%s, %s, backup behind %s:\ngot  %.900s\nwant %.900s", d.name, fr.name, backup, fmt.Sprintf("%+v", ours), fmt.Sprintf("%+v", plain))
						}
					}
				}
			}
		})
	}
}

// TestErrorRoutesGetTheRequest has requests that fail, each in its own way, and error
// routes that send them to a backup. The backup must get the whole request, as it does if
// reverse_proxy fails before it reads the body. Routes without a backup must send what
// reverse_proxy sends.
func TestErrorRoutesGetTheRequest(t *testing.T) {
	seen := &arrivals{list: make(map[string][]arrival)}
	primary, backup := seen.upstream(t, "primary", nil), seen.upstream(t, "backup", nil)
	goOn := make(chan struct{})
	silent := func(name string) string {
		return seen.upstream(t, name, func(r *http.Request) {
			if r.Method != http.MethodPost {
				return // the router asks for its models
			}
			select {
			case <-goOn:
			case <-r.Context().Done():
			}
		})
	}
	ill := serveRaw(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
	auth := serveRaw(t, func(http.ResponseWriter, *http.Request) {})
	dead := freeAddr(t)

	planned := func(d destination, f framing) bool { return d.inference && d.read && f.fits() && f.size > 0 }
	full := silent("full")
	const limits = "worker * {\nmax_running 1\n}\n"
	pairs := []pair{
		proxies("served", primary),
		proxies("as_get", primary, "method GET", "rewrite /other?b"),
		proxies("as_head", primary, "method HEAD"),
		proxies("refused", dead),
		before("forward_auth "+auth+" {\nuri /\n}", proxies("refused_after_auth", dead)),
		before("request_body {\nmax_size 1MB\n}", proxies("refused_with_limit", dead)),
		proxies("ill", ill, "health_uri /", "health_interval 50ms"),
		refusing("no_model", primary, planned, "worker * {\nmodels x\n}"),
		refusing("too_long", primary, func(d destination, f framing) bool { return d.inference && d.read && !f.fits() }, "trust tenants"),
		refusing("bad_nvext", primary, planned, "require_pin"),
		refusing("queue_full", full, planned, limits+"queue {\nmax_waiting 1\nmax_wait 10m\n}"),
		refusing("queue_timeout", full, planned, limits+"queue {\nmax_wait 10ms\n}"),
		refusing("no_first_token", silent("silent"), planned, "timeouts {\nfirst_token 30ms\n}"),
	}
	s := startCaddy(t, places(pairs, backup))
	var held []asked
	for _, path := range []string{"/kv_router/queue_full", "/kv_router/queue_full", "/kv_router/queue_timeout"} {
		held = append(held, s.start(t, path+"/v1/chat/completions", string(ask("wait").body())))
	}
	eventually(t, "the queue is full", func() bool { return s.scrape(t).value(waitingRequests) == 1 })
	eventually(t, "the upstream that is ill is left alone", func() bool {
		a := s.post(t.Context(), "/kv_router/ill/v1/chat/completions", ask("hi").body())
		b := s.post(t.Context(), "/reverse_proxy/ill/v1/chat/completions", ask("hi").body())
		return a.status == http.StatusOK && b.status == http.StatusOK
	})
	s.compareAll(t, seen, pairs, "X-Tenant-Id", "mine")
	close(goOn)
	for _, q := range held {
		q.wait(t)
	}
	for id, list := range seen.list {
		if at := list[len(list)-1]; strings.Contains(id, "refus") && at.At != "backup" {
			t.Errorf("%s came to %s", id, at.At)
		}
	}
	s.booksAtZero(t)
}

// TestBodiesAreLetGoOnceAnswersBegin has active streams with large prompts, whose engine keeps none of them. Once they
// have begun, the router has no body, and has not taken the memory of half of them.
func TestBodiesAreLetGoOnceAnswersBegin(t *testing.T) {
	const n = 12
	s := startCaddy(t, "kv_router "+serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.Method == http.MethodPost {
			stall(nil, oneChunk)(w, r)
		}
	}))
	for _, size := range []int{3 << 20, 5 << 20} { // with memory that is used again, and without
		before, body := s.scrape(t).value(firstToken+"_count"), ask(strings.Repeat("word ", size/5)).streamed().body()
		used := heap()
		for range n {
			go s.post(t.Context(), atChat, body)
		}
		eventually(t, "all streams have begun", func() bool { return s.scrape(t).value(firstToken+"_count") == before+n })
		eventually(t, "the bodies to be let go of", func() bool { return s.bodyBytes(t) == 0 })
		eventually(t, "their memory to be free", func() bool { return heap()-used < n*int64(size)/2 })
	}
}

// heap returns the bytes in use.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc) //nolint:gosec // less than 2^63
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
				if v.name == "Expect" { // the router has the whole body: nothing is left to ask the engine for
					if seen := ours.Seen.Get("X-Seen-Expect"); seen != "" {
						t.Errorf("the engine saw Expect: %s", seen)
					}
					ours.Seen.Set("X-Seen-Expect", plain.Seen.Get("X-Seen-Expect"))
				}
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
