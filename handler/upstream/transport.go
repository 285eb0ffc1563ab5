// Package upstream is the HTTP client to the workers: the transport over which
// Caddy's proxy reaches them, and the requests that the router makes on its own
// account. It knows addresses, and nothing of pools, plans or engines.
package upstream

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Transport is the proxy's way to the workers. It embeds Caddy's transport, so that
// the optional interfaces that the proxy looks for are there.
type Transport struct {
	*reverseproxy.HTTPTransport
	// fresh takes a new connection for each request.
	fresh *http.Transport
	// attempt returns what makes the round trip of a request; nil if that is an
	// ordinary one, such as a health check's.
	attempt func(context.Context) http.RoundTripper
}

// Load makes the transport that the configuration of a proxy names, or Caddy's
// default, and puts it into the proxy. The proxy must not be provisioned yet: its
// health checkers start there. wrap wraps each connection to a worker.
func Load(ctx caddy.Context, rp *reverseproxy.Handler, wrap func(net.Conn) net.Conn, attempt func(context.Context) http.RoundTripper) (*Transport, error) {
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
			return wrap(conn), nil
		}
	}
	t := &Transport{HTTPTransport: inner, fresh: inner.Transport.Clone(), attempt: attempt}
	t.fresh.DisableKeepAlives = true
	rp.Transport = t
	return t, nil
}

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if a := t.attempt(req.Context()); a != nil {
		return a.RoundTrip(req)
	}
	return t.HTTPTransport.RoundTrip(req)
}

// Send makes one round trip.
func (t *Transport) Send(req *http.Request) (*http.Response, error) {
	return t.HTTPTransport.RoundTrip(req)
}

// SendFresh makes one round trip on a connection of its own, and closes those that
// are idle.
func (t *Transport) SendFresh(req *http.Request) (*http.Response, error) {
	t.CloseIdle()
	t.SetScheme(req)
	return t.fresh.RoundTrip(req)
}

// CloseIdle closes the connections that no request uses. Caddy cleans up the
// transports that it has loaded, and not the default one.
func (t *Transport) CloseIdle() { t.Transport.CloseIdleConnections() }

// closesAfter tells whether a request of the router's own closes its connection:
// connections are for clients' requests, but those of HTTP/2 are for all.
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
