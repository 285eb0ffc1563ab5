package handler

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// dialInfoKey is the context key by which the proxy tells its transport where to
// dial.
const dialInfoKey = caddy.CtxKey("reverse_proxy.dial_info")

// proxyProtocolKey is the key of the variable that names the client to the PROXY
// protocol.
const proxyProtocolKey = "reverse_proxy.proxy_protocol_info"

var errNoDial = errors.New("the address has placeholders, or is not one socket")

// ownAgent is how the router's own requests name their client.
const ownAgent = "kv_router"

// toWorker returns the context in which the transport makes a request of the
// router's own to a worker, the host that it is for, and the context's replacer.
func (h *Handler) toWorker(ctx context.Context, w *worker) (context.Context, string, *caddy.Replacer, error) {
	if strings.Contains(w.dial, "{") {
		return nil, "", nil, errNoDial
	}
	addr, err := caddy.ParseNetworkAddress(w.dial)
	if err != nil {
		return nil, "", nil, err
	}
	if addr.PortRangeSize() != 1 && !addr.IsUnixNetwork() {
		return nil, "", nil, errNoDial
	}
	host := addr.JoinHostPort(0)
	info := reverseproxy.DialInfo{Network: addr.Network, Address: host, Host: addr.Host}
	if addr.IsUnixNetwork() {
		host = "localhost"
	} else {
		info.Port = strconv.FormatUint(uint64(addr.StartPort), 10)
	}
	repl := caddy.NewReplacer()
	repl.Set("http.reverse_proxy.upstream.hostport", host)
	repl.Set("http.reverse_proxy.upstream.host", addr.Host)
	ctx = context.WithValue(ctx, caddy.ReplacerCtxKey, repl)
	ctx = context.WithValue(ctx, dialInfoKey, info)
	ctx = context.WithValue(ctx, caddyhttp.VarsCtxKey, map[string]any{
		proxyProtocolKey: reverseproxy.ProxyProtocolInfo{AddrPort: netip.AddrPortFrom(netip.IPv6Loopback(), 0)},
	})
	return ctx, host, repl, nil
}

// ownConnection tells whether a request of the router's own takes a connection
// for itself: they are for clients' requests, but those of HTTP/2 are for all.
func (h *Handler) ownConnection(t *reverseproxy.HTTPTransport) bool {
	return !t.TLSEnabled() && !slices.Contains(t.Versions, "h2c")
}

// call makes a request of the router's own to a worker, GET if body is nil, else
// POST. It returns the answer's status, 0 if there is none, and at most limit bytes
// of its body. The request has the worker's key, unless authorization is that of a
// client.
func (h *Handler) call(ctx context.Context, w *worker, path string, body []byte, authorization []string, limit int64) (status int, answer []byte, err error) {
	req, err := h.ownCall(ctx, w, path, body, authorization)
	if err != nil {
		return 0, nil, err
	}
	resp, err := h.ReverseProxy.Transport.(*transport).HTTPTransport.RoundTrip(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(io.LimitReader(resp.Body, limit))
	return resp.StatusCode, answer, err
}

// ownCall returns the request that call makes.
func (h *Handler) ownCall(ctx context.Context, w *worker, path string, body []byte, authorization []string) (*http.Request, error) {
	method := http.MethodGet
	if body != nil {
		method = http.MethodPost
	}
	ctx, host, repl, err := h.toWorker(ctx, w)
	if err != nil {
		return nil, err
	}
	t := h.ReverseProxy.Transport.(*transport).HTTPTransport
	req, err := http.NewRequestWithContext(ctx, method, "http://"+host+path, bytes.NewReader(body)) //nolint:gosec // the host is the operator's
	if err != nil {
		return nil, err
	}
	if rewrite := h.ReverseProxy.Rewrite; rewrite != nil { // as it does clients' requests
		rewrite.Rewrite(req, caddyhttp.NewTestReplacer(req))
		req = req.WithContext(ctx)
		req.Method, req.RequestURI = method, ""
	}
	req.URL.Scheme = "" // the transport knows it
	req.Header.Set("User-Agent", ownAgent)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if authorization != nil {
		req.Header["Authorization"] = authorization
	}
	req.Close = h.ownConnection(t)
	if ops := h.ReverseProxy.Headers; ops != nil && ops.Request != nil {
		ops.Request.ApplyToRequest(req)
	}
	if key := h.pool.settings.Load().worker(w.dial).APIKey; key != "" && authorization == nil {
		req.Header.Set("Authorization", "Bearer "+repl.ReplaceAll(key, ""))
	}
	if ops := t.RequestHeaderOps(); ops != nil {
		ops.ApplyToRequest(req)
	}
	return req, nil
}
