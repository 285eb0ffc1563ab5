package tests

import (
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
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
func (s *server) sendTo(t *testing.T, seen *arrivals, id, url string, d destination, fr framing, header ...string) result {
	t.Helper()
	text := ""
	if fr.size > 0 {
		text = d.begin + strings.Repeat("a", fr.size) + d.end
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if fr.chunked {
		req.ContentLength = -1
		req.Body = io.NopCloser(strings.NewReader(text))
	}
	req.Header.Set("Content-Type", d.kind)
	req.Header.Set("X-Case", id)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := s.client.Do(req)
	if err != nil {
		t.Errorf("%s: %v", id, err)
		return result{}
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	return result{resp.StatusCode, string(got), fmt.Sprint(err), seen.of(id)}
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
							url := s.url + "/" + directive + "/" + p.name + d.path
							got[i] = s.sendTo(t, seen, id, url, d, fr, append(header, "X-Backup", backup)...)
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
