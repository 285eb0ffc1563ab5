// Package upstream is the HTTP client to the workers. It has the transport over which Caddy's
// proxy reaches them, and makes the router's own requests. It knows addresses, but no pools,
// plans or engines.
package upstream

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/body"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Transport is the proxy's transport. It embeds Caddy's, so that it has the optional
// interfaces that the proxy looks for.
type Transport struct {
	*reverseproxy.HTTPTransport
	// fresh takes a new connection for each request.
	fresh *http.Transport
	// attempt returns the round tripper of a request; nil for an ordinary request, such as a
	// health check.
	attempt func(context.Context) http.RoundTripper
}

// Load makes the transport that a proxy's configuration names, or Caddy's default, and sets
// it in the proxy. The proxy must not be provisioned yet: that starts its health checks.
func Load(ctx caddy.Context, rp *reverseproxy.Handler, attempt func(context.Context) http.RoundTripper) (*Transport, error) {
	inner := new(reverseproxy.HTTPTransport)
	if rp.TransportRaw != nil {
		mod, err := ctx.LoadModule(rp, "TransportRaw")
		if err != nil {
			return nil, fmt.Errorf("loading transport: %w", err)
		}
		var ok bool
		if inner, ok = mod.(*reverseproxy.HTTPTransport); !ok {
			return nil, fmt.Errorf("transport %T is not supported: kv_router needs the http transport", mod)
		}
	} else if err := inner.Provision(ctx); err != nil {
		return nil, fmt.Errorf("provisioning transport: %w", err)
	}
	if dial := inner.Transport.DialContext; dial != nil {
		inner.Transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return body.Conn{Conn: conn}, nil
		}
	}
	t := &Transport{HTTPTransport: inner, fresh: inner.Transport.Clone(), attempt: attempt}
	t.fresh.DisableKeepAlives = true
	rp.Transport = t
	return t, nil
}

func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if a := t.attempt(req.Context()); a != nil {
		return a.RoundTrip(req)
	}
	return t.HTTPTransport.RoundTrip(req)
}

// Send makes one round trip. A worker whose certificate is not trusted, or that speaks no TLS, has not got the
// request, as if nothing had listened there.
func (t *Transport) Send(req *http.Request) (*http.Response, error) {
	resp, err := t.HTTPTransport.RoundTrip(req)
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	_, plain := errors.AsType[tls.RecordHeaderError](err)
	if untrusted || plain {
		err = reverseproxy.NewDialError(err)
	}
	return resp, err
}

// SendFresh makes one round trip on a new connection, and closes the idle ones.
func (t *Transport) SendFresh(req *http.Request) (*http.Response, error) {
	t.CloseIdle()
	t.SetScheme(req)
	return t.fresh.RoundTrip(req)
}

// CloseIdle closes the connections that no request uses. Caddy cleans up the transports that
// it has loaded, but not the default one.
func (t *Transport) CloseIdle() { t.Transport.CloseIdleConnections() }

// closesAfter returns whether a request of the router's own closes its connection.
// Connections are for clients' requests, but those of HTTP/2 are for all.
func (t *Transport) closesAfter() bool {
	return !t.TLSEnabled() && !slices.Contains(t.Versions, "h2c")
}

// Interface guards: what the proxy asserts of a transport.
var (
	_ reverseproxy.TLSTransport                        = (*Transport)(nil)
	_ reverseproxy.H2CTransport                        = (*Transport)(nil)
	_ reverseproxy.ProxyProtocolTransport              = (*Transport)(nil)
	_ reverseproxy.HealthCheckSchemeOverriderTransport = (*Transport)(nil)
	_ reverseproxy.RequestHeaderOpsTransport           = (*Transport)(nil)
)

// Agent is the User-Agent of the router's own requests.
const Agent = "kv_router"

// Client makes the router's own requests: probes, questions, prefills. They get the proxy's
// rewrites and header operations, as clients' requests do. Most take a connection of their
// own.
type Client struct {
	proxy     *reverseproxy.Handler
	transport *Transport
	key       func(dial string) (key string, may bool)
}

// NewClient returns a client. key returns the API key of the worker at an address,
// which may have placeholders; empty if there is none. may: the router may make requests of its
// own to the worker.
func NewClient(proxy *reverseproxy.Handler, t *Transport, key func(dial string) (key string, may bool)) *Client {
	return &Client{proxy: proxy, transport: t, key: key}
}

const (
	// dialInfoKey is the context key of the address that the transport dials.
	dialInfoKey = caddy.CtxKey("reverse_proxy.dial_info")
	// proxyProtocolKey is that of the client's address, for the PROXY protocol.
	proxyProtocolKey = "reverse_proxy.proxy_protocol_info"
)

// ErrNoDial means that an address is no single socket.
var ErrNoDial = errors.New("the address has placeholders, or is not one socket")

// errBackup means that an address is a backup's.
var errBackup = errors.New("a backup gets no requests of the router's own")

// May returns whether the router may make requests of its own to the worker at an address.
func (c *Client) May(dial string) bool {
	_, may := c.key(dial)
	return may
}

// dialInfo returns how the transport dials an address.
func dialInfo(dial string) (addr caddy.NetworkAddress, info reverseproxy.DialInfo, err error) {
	if strings.Contains(dial, "{") {
		return addr, info, ErrNoDial
	}
	if addr, err = caddy.ParseNetworkAddress(dial); err != nil {
		return addr, info, err
	}
	if addr.PortRangeSize() != 1 && !addr.IsUnixNetwork() {
		return addr, info, ErrNoDial
	}
	info = reverseproxy.DialInfo{Network: addr.Network, Address: addr.JoinHostPort(0), Host: addr.Host}
	if !addr.IsUnixNetwork() {
		info.Port = strconv.FormatUint(uint64(addr.StartPort), 10)
	}
	return addr, info, nil
}

// to returns the context for a request to an address, the host in the request, and the
// context's replacer.
func (c *Client) to(ctx context.Context, dial string) (context.Context, string, *caddy.Replacer, error) {
	addr, info, err := dialInfo(dial)
	if err == nil && !c.May(dial) {
		err = errBackup
	}
	if err != nil {
		return nil, "", nil, err
	}
	host := info.Address
	if addr.IsUnixNetwork() {
		host = "localhost"
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

// Fetch sends a request to an address, and reads the answer with ReadAll. authorization is the client's, if
// the request is made for one; nil sends the worker's API key.
func (c *Client) Fetch(
	ctx context.Context, dial, method, path string, body []byte, authorization []string, limit int64,
) (status int, answer []byte, err error) {
	ctx, host, repl, err := c.to(ctx, dial)
	if err != nil {
		return 0, nil, err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+host+path, bytes.NewReader(body)) //nolint:gosec // the host is the operator's
	if err != nil {
		return 0, nil, err
	}
	if rewrite := c.proxy.Rewrite; rewrite != nil { // as it does clients' requests
		rewrite.Rewrite(req, caddyhttp.NewTestReplacer(req))
		req = req.WithContext(ctx)
		req.Method, req.RequestURI = method, ""
	}
	req.URL.Scheme = "" // the transport knows it
	req.Header.Set("User-Agent", Agent)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if authorization != nil {
		req.Header["Authorization"] = authorization
	}
	req.Close = c.transport.closesAfter()
	if ops := c.proxy.Headers; ops != nil && ops.Request != nil {
		ops.Request.ApplyToRequest(req)
	}
	if key, _ := c.key(dial); key != "" && authorization == nil {
		req.Header.Set("Authorization", "Bearer "+repl.ReplaceAll(key, ""))
	}
	if ops := c.transport.RequestHeaderOps(); ops != nil {
		ops.ApplyToRequest(req)
	}
	resp, err := c.transport.Send(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err = ReadAll(resp.Body, limit)
	return resp.StatusCode, answer, err
}

// ReadAll reads an answer. If it is longer than limit bytes, ReadAll returns the beginning and
// ErrTooLong.
func ReadAll(r io.Reader, limit int64) ([]byte, error) {
	answer, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(answer)) > limit {
		return answer[:limit], ErrTooLong
	}
	return answer, err
}

// ErrTooLong means that an answer is too long.
var ErrTooLong = errors.New("the answer is too long")

// Forward sends a request that was made from a client's to an address, once.
func (c *Client) Forward(req *http.Request, dial string) (*http.Response, error) {
	ctx, _, _, err := c.to(req.Context(), dial)
	if err != nil {
		return nil, err
	}
	req = req.WithContext(ctx)
	req.Header.Set("User-Agent", Agent)
	req.GetBody = nil // or net/http might send it again
	req.Close = c.transport.closesAfter()
	return c.transport.Send(req)
}

// Phase sends a request that was made from a client's, with a URL of its own, to another worker. It
// takes the connections for clients' requests.
func (c *Client) Phase(req *http.Request, dial string) (*http.Response, error) {
	ctx, host, _, err := c.to(req.Context(), dial)
	if err != nil {
		return nil, err
	}
	req.URL.Host = host
	return c.transport.Send(req.WithContext(ctx))
}

// Original is what a request had before Caddy's proxy applied its header operations.
type Original struct {
	Header http.Header
	Host   string
}

// Redirect returns a request that Caddy's proxy made for one worker as it would make it for another
// one. The placeholders are that worker's, and the header operations are applied again.
func (c *Client) Redirect(req *http.Request, of Original, up *reverseproxy.Upstream) (*http.Request, error) {
	ctx := req.Context()
	repl, _ := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	_, info, err := dialInfo(repl.ReplaceAll(up.Dial, ""))
	if err != nil {
		return nil, err
	}
	info.Upstream = up
	const placeholder = "http.reverse_proxy.upstream."
	repl.Set(placeholder+"address", info.String())
	repl.Set(placeholder+"hostport", info.Address)
	repl.Set(placeholder+"host", info.Host)
	repl.Set(placeholder+"port", info.Port)
	repl.Set(placeholder+"max_requests", up.MaxRequests)
	if up.Host != nil {
		repl.Set(placeholder+"requests", up.Host.NumRequests())
		repl.Set(placeholder+"fails", up.Host.Fails())
	}
	out := req.WithContext(context.WithValue(ctx, dialInfoKey, info))
	at := *req.URL
	out.URL = &at
	at.Host = info.Address // net/http tells connections apart by it
	if old, ok := reverseproxy.GetDialInfo(ctx); ok {
		client, others := strings.CutSuffix(req.URL.Host, url.QueryEscape("->"+old.Address))
		if others { // as Caddy does for the PROXY protocol
			at.Host = client + url.QueryEscape("->"+info.Address)
		}
	}
	c.applyOps(out, of)
	return out, nil
}

// applyOps applies the header operations of the transport and the operator, in the proxy's order.
func (c *Client) applyOps(req *http.Request, of Original) {
	ours := c.transport.RequestHeaderOps()
	var theirs *headers.HeaderOps
	if c.proxy.Headers != nil {
		theirs = c.proxy.Headers.Request
	}
	if ours == nil && theirs == nil {
		return
	}
	req.Header, req.Host = of.Header.Clone(), of.Host
	if ours != nil {
		ours.ApplyToRequest(req)
	}
	if theirs != nil {
		theirs.ApplyToRequest(req)
	}
	for name, values := range req.Header { // as servers of WebSockets expect it, and the proxy does
		if rest, is := strings.CutPrefix(name, "Sec-Websocket-"); is {
			delete(req.Header, name)
			req.Header["Sec-WebSocket-"+rest] = values
		}
	}
}

// Connect opens and closes a connection to an address, which costs the worker nothing. tried
// is false if it did nothing: a forward proxy hides the worker, or the worker would log a
// failed TLS handshake.
func (c *Client) Connect(ctx context.Context, dial string) (tried bool, err error) {
	ctx, host, _, err := c.to(ctx, dial)
	if err != nil || c.transport.TLSEnabled() || slices.Contains(c.transport.Versions, "3") {
		return false, nil //nolint:nilerr // a request to such an address shows it
	}
	t := c.transport.Transport
	if t.Proxy != nil {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+host, nil)
		if err != nil {
			return false, nil //nolint:nilerr // as above
		}
		if via, err := t.Proxy(req); via != nil || err != nil {
			return false, nil //nolint:nilerr // as above
		}
	}
	info, _ := reverseproxy.GetDialInfo(ctx)
	conn, err := t.DialContext(ctx, info.Network, info.Address)
	if err == nil {
		_ = conn.Close()
	}
	return true, err
}
