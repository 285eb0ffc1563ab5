package upstream

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// TestRedirectedRequestIsAsTheProxyMakesIt redirects a request from a worker to another one. The header
// operations are applied to what the client sent, with the other worker's placeholders.
func TestRedirectedRequestIsAsTheProxyMakesIt(t *testing.T) {
	repl := caddy.NewReplacer()
	ctx := context.WithValue(t.Context(), caddy.ReplacerCtxKey, repl)
	ctx = context.WithValue(ctx, dialInfoKey, reverseproxy.DialInfo{Network: "tcp", Address: "a:1", Host: "a", Port: "1"})
	req := httptest.NewRequest(http.MethodPost, "http://a:1/v1/chat/completions", http.NoBody).WithContext(ctx)
	req.Header = http.Header{"X-To": {"a:1"}, "X-Added": {"1", "2"}}
	of := Original{Host: "client.example", Header: http.Header{"X-Added": {"1"}, "Sec-Websocket-Key": {"k"}}}
	proxy := &reverseproxy.Handler{Headers: &headers.Handler{Request: &headers.HeaderOps{
		Set: http.Header{"X-To": {"{http.reverse_proxy.upstream.hostport}"}, "Host": {"{http.reverse_proxy.upstream.host}"}},
		Add: http.Header{"X-Added": {"2"}},
	}}}
	c := NewClient(proxy, &Transport{HTTPTransport: new(reverseproxy.HTTPTransport)}, nil)
	out, err := c.Redirect(req, of, &reverseproxy.Upstream{Dial: "b:2", MaxRequests: 7, Host: new(reverseproxy.Host)})
	if err != nil {
		t.Fatal(err)
	}
	want := http.Header{"X-To": {"b:2"}, "X-Added": {"1", "2"}, "Sec-WebSocket-Key": {"k"}} //nolint:canonicalheader // RFC 6455
	if len(out.Header) != len(want) {
		t.Errorf("header %v, want %v", out.Header, want)
	}
	for name, values := range want {
		if !slices.Equal(out.Header[name], values) {
			t.Errorf("%s: %q, want %q", name, out.Header[name], values)
		}
	}
	if info, _ := reverseproxy.GetDialInfo(out.Context()); info.Address != "b:2" || out.URL.Host != "b:2" || out.Host != "b" {
		t.Errorf("dials %q, URL %v, host %q", info.Address, out.URL, out.Host)
	}
	if most, _ := repl.Get("http.reverse_proxy.upstream.max_requests"); most != 7 {
		t.Errorf("max_requests %v", most)
	}
	if req.URL.Host != "a:1" || req.Header.Get("X-To") != "a:1" || len(of.Header) != 2 {
		t.Errorf("the first request has changed: %v %v", req.URL, req.Header)
	}
}

// TestRedirectWithoutOperations keeps the header of the request, which needs no copy.
func TestRedirectWithoutOperations(t *testing.T) {
	ctx := context.WithValue(t.Context(), caddy.ReplacerCtxKey, caddy.NewReplacer())
	req := httptest.NewRequest(http.MethodGet, "http://a:1/", http.NoBody).WithContext(ctx)
	req.Host = "client.example"
	c := NewClient(new(reverseproxy.Handler), &Transport{HTTPTransport: new(reverseproxy.HTTPTransport)}, nil)
	for _, dial := range []string{"b:2", "unix//run/engine.sock"} {
		out, err := c.Redirect(req, Original{}, &reverseproxy.Upstream{Dial: dial})
		if err != nil || out.Host != "client.example" {
			t.Errorf("%s: host %q, error %v", dial, out.Host, err)
		}
	}
	if _, err := c.Redirect(req, Original{}, &reverseproxy.Upstream{Dial: "b:1-9"}); err == nil {
		t.Error("a range of ports is no worker")
	}
}

// TestWorkersWithoutATrustedCertificateAreNotConnected sends to a server with a certificate of its own, and to one
// without TLS.
func TestWorkersWithoutATrustedCertificateAreNotConnected(t *testing.T) {
	for name, start := range map[string]func(http.Handler) *httptest.Server{"untrusted": httptest.NewTLSServer, "plain": httptest.NewServer} {
		srv := start(http.NotFoundHandler())
		transport := &Transport{HTTPTransport: &reverseproxy.HTTPTransport{TLS: new(reverseproxy.TLSConfig), Transport: new(http.Transport)}}
		resp, err := transport.Send(httptest.NewRequest(http.MethodGet, "https://"+srv.Listener.Addr().String(), http.NoBody))
		if _, ok := errors.AsType[reverseproxy.DialError](err); !ok {
			t.Errorf("%s: error %v", name, err)
		}
		if err == nil {
			resp.Body.Close()
		}
		srv.Close()
	}
}
