package tests

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// digest is how a text is known that an engine cannot have as it is.
func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// TestTenantsOfAnyName has names that a Dynamo cannot read in a header, or that
// are longer than a salt may be. What the client writes beside them never counts.
func TestTenantsOfAnyName(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	long := strings.Repeat("x", 9000)
	const body = `{"model":"m","messages":[],"cache_salt":"victim","nvext":{"cache_salt":"victim","greed_sampling":true}}`
	for _, block := range []string{"", "enforce_cache_salt"} {
		for _, v := range []struct{ kind, tenant, want string }{
			{"dynamo", "mine", "mine"},
			{"dynamo", "my own", "my own"},
			{"dynamo", "müller", digest("müller")},
			{"dynamo", "m\xfcller", digest("m\xfcller")},
			{"dynamo", long, digest(long)},
			{"vllm", "müller", "müller"},
			{"vllm", long, digest(long)},
		} {
			s := startCaddy(t, route([]*canned.Engine{e}, typed(e, v.kind, "cache_salt on"), "trust tenants", block))
			a := s.post(t.Context(), "/v1/chat/completions", []byte(body), "X-Tenant-Id", v.tenant)
			got := lastOf(e)
			if a.status != 200 || strings.Contains(string(got.Body), "victim") {
				t.Errorf("%s, %.20q: status %d, the engine got %.200s", v.kind, v.tenant, a.status, got.Body)
			}
			if v.kind == "dynamo" && fmt.Sprint(got.Header["X-Tenant-Id"]) != "["+v.want+"]" {
				t.Errorf("%.20q: the Dynamo got the tenant %.100q", v.tenant, got.Header["X-Tenant-Id"])
			}
			if v.kind == "vllm" && !strings.Contains(string(got.Body), `"cache_salt":"`+v.want+`"`) {
				t.Errorf("%.20q: the engine got %.200s", v.tenant, got.Body)
			}
			if !strings.Contains(string(got.Body), `"greed_sampling":true`) && v.kind == "dynamo" {
				t.Errorf("the rest of nvext is lost: %s", got.Body)
			}
		}
	}
	// a gateway that adds its tenant behind a name of the client's
	s := startCaddy(t, "request_header +X-Tenant-Id mine\n"+route([]*canned.Engine{e}, typed(e, "vllm"), "trust tenants"))
	both := strings.Repeat("x", 8190)
	s.post(t.Context(), "/v1/chat/completions", []byte(body), "X-Tenant-Id", both)
	if got := string(lastOf(e).Body); !strings.Contains(got, `"cache_salt":"`+digest(both+", mine")+`"`) {
		t.Errorf("the engine got %.200s", got)
	}
	// who is not granted it has none, however long
	s = startCaddy(t, route([]*canned.Engine{e}, typed(e, "vllm")))
	before := s.scrape(t)
	s.post(t.Context(), "/v1/chat/completions", []byte(`{"messages":[],"cache_salt":"own"}`), "X-Tenant-Id", long)
	if got := string(lastOf(e).Body); got != `{"messages":[],"cache_salt":"own"}` || lastOf(e).Header.Get("X-Tenant-Id") != "" {
		t.Errorf("without trust the engine got %s", got)
	}
	if n := s.scrape(t).value(nvextDropped, `grant="tenants"`) - before.value(nvextDropped, `grant="tenants"`); n != 1 {
		t.Errorf("%v dropped of tenants, want 1", n)
	}
}

// TestOverrideHeadersDoNotPass has headers that an SGLang may take for members of
// the body, of clients with trust and without.
func TestOverrideHeadersDoNotPass(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, route([]*canned.Engine{e}, typed(e, "sglang", "dp_size 2"), trust("priorities pins")))
	header := []string{"X-Override-Routed-Dp-Rank", "1", "X-Override-Priority", "99", "X-Override-Rid", "r"}
	for _, trusts := range []bool{false, true} {
		before := s.scrape(t)
		all := append([]string(nil), header...)
		if trusts {
			all = append(all, trusted...)
		}
		s.post(t.Context(), "/generate", []byte(`{"text":"x"}`), all...)
		for name := range lastOf(e).Header {
			if strings.HasPrefix(name, "X-Override-") {
				t.Errorf("trusted %v: the engine got %s", trusts, name)
			}
		}
		drops := map[bool]float64{false: 1}[trusts]
		if n := s.scrape(t).value(nvextDropped, `grant="pins"`) - before.value(nvextDropped, `grant="pins"`); n != drops {
			t.Errorf("trusted %v: %v dropped of pins", trusts, n)
		}
	}
}

// TestTrailersDoNotPass has trailers behind a body, with routing headers among them.
func TestTrailersDoNotPass(t *testing.T) {
	trailers := make(chan http.Header, 1)
	ln, err := canned.Listen()
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.UserAgent() != "kv_router" {
			trailers <- r.Trailer
		}
		_, _ = io.WriteString(w, "{}")
	})}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	s := startCaddy(t, "kv_router "+ln.Addr().String()+" {\npool trailers\nmax_body 64KiB\ntrust priorities\n}")
	for _, v := range []struct{ path, body string }{
		{"/v1/chat/completions", `{"messages":[]}`}, // which is read
		{"/v1/chat/completions", `{"x":"` + strings.Repeat("x", 128<<10) + `"}`},
		{"/upload", "x"},
	} {
		conn := s.connect(t)
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"+
			"Trailer: X-Tenant-Id, X-Dynamo-Request-Priority, X-Sum\r\n\r\n%x\r\n%s\r\n0\r\nX-Tenant-Id: victim\r\nX-Dynamo-Request-Priority: 9\r\nX-Override-Priority: 9\r\nX-Sum: 1\r\n\r\n",
			v.path, s.addr, len(v.body), v.body)
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v, %v", v.path, resp, err)
		}
		resp.Body.Close()
		conn.Close()
		select {
		case got := <-trailers:
			if len(got) != 0 {
				t.Errorf("%s of %d bytes: the engine got the trailer %v", v.path, len(v.body), got)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%s did not reach the engine", v.path)
		}
	}
	s.booksAtZero(t)
}

// TestFirstRequestsAreHeldToTheSame has an SGLang that orders by priority, and that
// the router has not asked yet what it is.
func TestFirstRequestsAreHeldToTheSame(t *testing.T) {
	for i := range 3 {
		e := startSimulated(t, engine.Config{Flavour: engine.SGLang, KeepBodies: true, ServerInfo: map[string]any{"enable_priority_scheduling": true}})
		s := startCaddy(t, simulated([]*engine.Engine{e}, fmt.Sprintf("pool first%d", i)))
		const path = "/v1/chat/completions"
		got := s.receivedBy(t, e, path, `{"model":"sim-8b","messages":[{"role":"user","content":"hi"}],"max_tokens":2,"priority":99}`)
		if strings.Contains(string(got.Body), "priority") {
			t.Errorf("the engine got %s", got.Body)
		}
	}
	// who has told nothing by then is served as by any proxy
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, route([]*canned.Engine{e}, "pool third"))
	if a := s.post(t.Context(), "/v1/chat/completions", []byte(`{"messages":[],"priority":99}`)); a.status != 200 || !strings.Contains(string(lastOf(e).Body), `"priority":99`) {
		t.Errorf("status %d, the engine got %s", a.status, lastOf(e).Body)
	}
}
