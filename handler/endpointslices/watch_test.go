package endpointslices

import (
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/caddyserver/caddy/v2"
)

// server plays the API server for one Service.
type server struct {
	*httptest.Server
	mu      sync.Mutex
	list    string            // the answer to a list
	events  chan string       // what the watch under way sends; "end" ends it
	answers map[string]answer // to a list or a watch, instead
	calls   map[string]int
	token   string
	queries []string // of watches
}

type answer struct {
	status int
	body   string
}

func startServer(t *testing.T, pods ...string) *server {
	s := &server{events: make(chan string, 100), answers: make(map[string]answer), calls: make(map[string]int), token: "t1"}
	s.setList(pods...)
	s.Server = httptest.NewUnstartedServer(s)
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(s.Close)
	t.Cleanup(s.CloseClientConnections)
	return s
}

func (s *server) setList(pods ...string) {
	s.set(func() { s.list = listJSON("5", sliceJSON("a", "IPv4", web, pods...)) })
}

func (s *server) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	verb := "list"
	if r.URL.Query().Has("watch") {
		verb = "watch"
	}
	s.mu.Lock()
	s.calls[verb]++
	instead, list := s.answers[verb], s.list
	if verb == "watch" {
		s.queries = append(s.queries, r.URL.RawQuery)
	}
	if r.Header.Get("Authorization") != "Bearer "+s.token {
		instead = answer{401, `{"kind":"Status","message":"Unauthorized"}`}
	}
	s.mu.Unlock()
	switch {
	case r.URL.Path != "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices" ||
		r.URL.Query().Get("labelSelector") != "kubernetes.io/service-name=vllm":
		http.NotFound(w, r)
	case instead.status != 0:
		w.WriteHeader(instead.status)
		fmt.Fprint(w, instead.body)
	case verb == "list":
		fmt.Fprint(w, list)
	default:
		w.WriteHeader(http.StatusOK)
		for {
			_ = http.NewResponseController(w).Flush()
			select {
			case e := <-s.events:
				if e == "end" {
					return
				}
				fmt.Fprintln(w, e)
			case <-r.Context().Done():
				return
			}
		}
	}
}

// called waits until the server was called n times.
func (s *server) called(t *testing.T, verb string, n int) {
	t.Helper()
	eventually(t, fmt.Sprint(n, " calls: ", verb), func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.calls[verb] >= n
	})
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not in time: ", what)
		}
	}
}

// of returns what a watcher of the server follows.
func (s *server) of(t *testing.T) target {
	ca, token := filepath.Join(t.TempDir(), "ca.crt"), filepath.Join(t.TempDir(), "token")
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	for file, text := range map[string][]byte{ca: cert, token: []byte("t1\n")} {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return target{namespace: "models", service: "vllm", api: s.URL, tokenFile: token, caFile: ca}
}

// follow begins to follow the server, and returns what the watcher logs.
func (s *server) follow(t *testing.T, relist time.Duration) (*watcher, *observer.ObservedLogs) {
	core, log := observer.New(zap.InfoLevel)
	w := newWatcher(s.of(t), relist, 10*time.Millisecond, func() *zap.Logger { return zap.New(core) })
	t.Cleanup(func() { _ = w.Destruct() })
	return w, log
}

func (w *watcher) has(t *testing.T, dials ...string) {
	t.Helper()
	eventually(t, fmt.Sprint("the pods are ", dials), func() bool {
		got, err := w.dials(t.Context())
		return err == nil && slices.Equal(got, dials)
	})
}

func event(kind string, pods ...string) string {
	return fmt.Sprintf(`{"type":%q,"object":%s}`, kind, sliceJSON("b", "IPv4", web, pods...))
}

// TestWatch applies events, and goes on after each way in which a watch can end.
func TestWatch(t *testing.T) {
	s := startServer(t, pod("1", "10.0.0.1", ready))
	w, _ := s.follow(t, time.Minute)
	w.has(t, "10.0.0.1:8000")
	s.events <- event("ADDED", pod("2", "10.0.0.2", ready))
	w.has(t, "10.0.0.1:8000", "10.0.0.2:8000")
	was := w.version.Load()
	s.events <- `{"type":"BOOKMARK","object":{"kind":"EndpointSlice","metadata":{"resourceVersion":"9"},"endpoints":null,"ports":null}}`
	s.events <- event("MODIFIED", pod("2", "10.0.0.2", ends), pod("3", "10.0.0.3", ready))
	w.has(t, "10.0.0.1:8000", "10.0.0.3:8000")
	if w.version.Load() == was {
		t.Error("the version is the same")
	}
	s.events <- event("DELETED")
	w.has(t, "10.0.0.1:8000")
	for i, end := range []string{
		"end", `{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old resource version"}}`, "garbage",
	} {
		s.setList(pod("4", fmt.Sprint("10.0.1.", i), ready))
		s.events <- end
		w.has(t, fmt.Sprintf("10.0.1.%d:8000", i))
	}
	s.called(t, "watch", 4)
	if w.failures.Load() != 0 || !strings.Contains(s.queries[0], "resourceVersion=5&timeoutSeconds=60") {
		t.Errorf("%d failures, query %s", w.failures.Load(), s.queries[0])
	}
}

// TestSilentWatch has watches that report nothing, or that the server refuses because their version is
// gone. The next list puts that right.
func TestSilentWatch(t *testing.T) {
	for name, a := range map[string]answer{"silent": {}, "gone": {status: 410, body: `{"code":410}`}} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, pod("1", "10.0.0.1", ready))
			s.answers["watch"] = a
			w, _ := s.follow(t, time.Second) // less, and a slow header is a failure
			w.has(t, "10.0.0.1:8000")
			s.setList()
			w.has(t)
			if w.failures.Load() != 0 {
				t.Error("counts as a failure")
			}
		})
	}
}

// TestTheAPIServerFails has the answers of an API server, or of what stands before it. None empties the
// pool, and each is said once.
func TestTheAPIServerFails(t *testing.T) {
	for name, c := range map[string]struct {
		verb string
		a    answer
		says string
	}{
		"forbidden": {
			"list",
			answer{403, `{"kind":"Status","message":"endpointslices.discovery.k8s.io is forbidden: User \"system:serviceaccount:models:router\" cannot list"}`},
			`may not list endpointslices in namespace models: its service account needs a Role there with apiGroups [discovery.k8s.io], ` +
				`resources [endpointslices], verbs [get, list, watch] (the API server answers 403 Forbidden: endpointslices.discovery.k8s.io is forbidden`,
		},
		"watch forbidden": {"watch", answer{403, ""}, "may not watch endpointslices in namespace models"},
		"overloaded":      {"list", answer{429, "slow down"}, "the API server answers 429 Too Many Requests"},
		"broken":          {"list", answer{500, `{"message":"etcdserver: leader changed"}`}, "500 Internal Server Error: etcdserver: leader changed"},
		"another page":    {"list", answer{200, "<html>"}, "reading the list of endpointslices: invalid character"},
		"another object":  {"list", answer{200, `{"kind":"Status","items":[]}`}, `the answer is of kind "Status"`},
		"half a list":     {"list", answer{200, `{"kind":"EndpointSliceList","items":[`}, "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it waits
			s := startServer(t, pod("1", "10.0.0.1", ready))
			w, log := s.follow(t, time.Second) // less, and the end of a watch is another failure
			w.has(t, "10.0.0.1:8000")
			s.called(t, "watch", 1)
			s.set(func() { s.answers[c.verb] = c.a })
			eventually(t, "two failures", func() bool { return w.failures.Load() >= 2 })
			w.has(t, "10.0.0.1:8000")
			lines := log.FilterMessageSnippet("cannot follow").All()
			if len(lines) != 1 || !strings.Contains(fmt.Sprint(lines[0].ContextMap()["error"]), c.says) {
				t.Errorf("log: %v; want one line with %s", lines, c.says)
			}
			s.set(func() { delete(s.answers, c.verb) })
			s.setList(pod("2", "10.0.0.2", ready))
			w.has(t, "10.0.0.2:8000")
			eventually(t, "recovered", func() bool { return log.FilterMessageSnippet("again").Len() == 1 })
		})
	}
}

// TestTheAPIServerIsAway ends the API server's connections and listener. The last list stays.
func TestTheAPIServerIsAway(t *testing.T) {
	s := startServer(t, pod("1", "10.0.0.1", ready))
	w, _ := s.follow(t, time.Minute)
	w.has(t, "10.0.0.1:8000")
	s.called(t, "watch", 1)
	s.Listener.Close()
	s.CloseClientConnections()
	eventually(t, "a failure", func() bool { return w.failures.Load() > 0 })
	w.has(t, "10.0.0.1:8000")

	never := newWatcher(target{namespace: "models", service: "vllm", api: s.URL}, time.Minute, time.Second, zap.NewNop)
	defer func() { _ = never.Destruct() }()
	if _, err := never.dials(t.Context()); err == nil || !strings.Contains(err.Error(), "service models/vllm are unknown") || never.version.Load() != 0 {
		t.Errorf("version %d, error %v", never.version.Load(), err)
	}
}

// TestTokenRotates changes the token that the server accepts.
func TestTokenRotates(t *testing.T) {
	s := startServer(t, pod("1", "10.0.0.1", ready))
	w, _ := s.follow(t, 0)
	w.has(t, "10.0.0.1:8000")
	s.set(func() { s.token = "t2" })
	eventually(t, "a failure", func() bool { return w.failures.Load() > 0 })
	if err := os.WriteFile(w.target.tokenFile, []byte("t2"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.setList(pod("2", "10.0.0.2", ready))
	w.has(t, "10.0.0.2:8000")
}

// TestNothingToUse says once why no endpoint can be used. A Service without pods needs no such line.
func TestNothingToUse(t *testing.T) {
	s := startServer(t)
	w, log := s.follow(t, 0)
	w.has(t)
	for i, list := range []string{listJSON("6"), listJSON("7", sliceJSON("a", "IPv4", "[]", pod("1", "10.0.0.1", ready)))} {
		s.set(func() { s.list = list })
		s.called(t, "list", s.calls["list"]+3)
		if n := log.FilterMessageSnippet("cannot be used").Len(); n != i+1 {
			t.Errorf("%d lines, want %d", n, i+1)
		}
	}
	w.has(t)
}

// TestConfigurationsShareAWatcher provisions a source twice, as a reload does.
func TestConfigurationsShareAWatcher(t *testing.T) {
	s := startServer(t, pod("1", "10.0.0.1", ready))
	of := s.of(t)
	provision := func() (*Upstreams, func()) {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
		u := &Upstreams{Namespace: of.namespace, Service: of.service, API: of.api, TokenFile: of.tokenFile, CAFile: of.caFile}
		if err := u.Provision(ctx); err != nil {
			t.Fatal(err)
		}
		return u, func() {
			cancel()
			if err := u.Cleanup(); err != nil {
				t.Error(err)
			}
		}
	}
	old, endOld := provision()
	old.watcher.has(t, "10.0.0.1:8000")
	fresh, endFresh := provision()
	endOld()
	s.called(t, "watch", 1)
	s.events <- event("ADDED", pod("2", "10.0.0.2", ready))
	for _, u := range []*Upstreams{old, fresh} {
		u.watcher.has(t, "10.0.0.1:8000", "10.0.0.2:8000")
	}
	endFresh()
	if ups, err := old.GetUpstreams(httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)); err != nil || len(ups) != 2 || s.calls["list"] != 1 {
		t.Errorf("%d upstreams, error %v, %d lists", len(ups), err, s.calls["list"])
	}
	if err := new(Upstreams).Cleanup(); err != nil {
		t.Error(err)
	}
}
