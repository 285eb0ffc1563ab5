package handler

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	// lookEvery is how often the workers are asked for their models.
	lookEvery = 5 * time.Second
	// lookTimeout is how long a worker may take to tell.
	lookTimeout = 2 * time.Second
	// firstLook is how long the first requests wait for what the workers tell.
	firstLook = time.Second
	// idleAfter is how long a pool must have no request to be idle: its workers
	// may sleep, or cost money for each question, and are asked as rarely as
	// those that tell nothing.
	idleAfter = 10 * time.Minute
)

// scout asks the workers which models they serve, and now and then what they
// are, from the handler's first request until its end.
type scout struct {
	news  chan struct{} // there is something to be asked at once
	first chan struct{} // closed after the first look; made in Provision
}

// startScout begins to ask. A handler that was cleaned up meanwhile, whose last
// requests still run, asks no more.
func (h *Handler) startScout() {
	ctx := h.ctx
	if ctx == nil {
		return // never provisioned, as in tests
	}
	go func() {
		ticker := time.NewTicker(lookEvery)
		defer ticker.Stop()
		for first := true; ; first = false {
			h.look(ctx, first)
			if first {
				close(h.scout.first)
			}
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			case <-h.scout.news:
			}
		}
	}()
}

// own returns the workers that are this handler's to ask: its upstreams, and of
// a dynamic source those that it gave lately. Others of the pool may be reached
// in another way, are perhaps no upstreams any more, or have an address that a
// client chose.
func (h *Handler) own() []*worker {
	if h.ReverseProxy.DynamicUpstreams != nil {
		list := h.pool.all()
		return slices.DeleteFunc(list, func(w *worker) bool {
			return w.by.Load() != h || h.pool.used.Load()-w.seen.Load() > int64(workerGrace/time.Second)
		})
	}
	list := make([]*worker, 0, len(h.ReverseProxy.Upstreams))
	for _, up := range h.ReverseProxy.Upstreams {
		if w := h.pool.known(up.Dial); w != nil {
			list = append(list, w)
		}
	}
	return list
}

// met takes in that a dynamic source gave a worker to this handler. A new one
// need not wait for the next look.
func (h *Handler) met(w *worker) {
	if h.ReverseProxy.DynamicUpstreams == nil || w.by.Load() == h {
		return
	}
	w.by.Store(h)
	if !w.looked.Load() {
		h.scout.lookSoon()
	}
}

// lookSoon lets the workers be asked without waiting for the next time.
func (s *scout) lookSoon() {
	select {
	case s.news <- struct{}{}:
	default: // it is about to be done
	}
}

// awaitFirstLook waits until it is known which models the workers serve, at
// most for firstLook. It returns at once where they have been asked before, and
// where there is nothing to know.
func (h *Handler) awaitFirstLook(ctx context.Context) {
	h.awaitLook(ctx, 2, func(w *worker) bool {
		return w.configured.Load() == nil && w.models.Load() == nil && !w.looked.Load()
	})
}

// awaitTold waits in the same way until the workers were asked what they are: what
// a client says, and may not, must not pass because nobody has asked yet whether
// its engine heeds it.
func (h *Handler) awaitTold(ctx context.Context) {
	h.awaitLook(ctx, 1, func(w *worker) bool {
		return !w.looked.Load() && h.pool.settings.Load().worker(w.dial).Engine != engine.Other
	})
}

// awaitLook waits for the first look if it is under way, there are so many
// workers at least, and something is open of one of them.
func (h *Handler) awaitLook(ctx context.Context, least int, open func(*worker) bool) {
	if h.ctx == nil {
		return
	}
	select {
	case <-h.scout.first:
		return
	default:
	}
	own := h.own()
	if len(own) < least || !slices.ContainsFunc(own, open) {
		return
	}
	timer := time.NewTimer(firstLook)
	defer timer.Stop()
	select {
	case <-h.scout.first:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// look asks all workers at the same time.
func (h *Handler) look(whole context.Context, first bool) {
	ctx, cancel := context.WithTimeout(whole, lookTimeout)
	defer cancel()
	done := make(chan struct{})
	asked := 0
	for _, w := range h.own() {
		last := w.asked.Load()
		if t := now().UnixNano(); !first && t-last < int64(h.pool.restOf(w)) || !w.asked.CompareAndSwap(last, t) {
			continue // another handler of the pool has just asked it
		}
		asked++
		go func() {
			defer func() { done <- struct{}{} }()
			// what the operator says that it serves it need not tell
			if w.configured.Load() != nil && !w.gone.Load() || h.ask(ctx, w) {
				h.detect(whole, w)
			}
			w.looked.Store(true)
		}()
	}
	for range asked {
		<-done
	}
	h.pool.agreeOnBlocks()
}

// restOf returns for how long a worker is left alone after it was asked.
func (p *pool) restOf(w *worker) time.Duration {
	rest := lookEvery / 2
	if n := w.refusals.Load(); n > 0 {
		rest = min(lookEvery<<min(n, 8), askedLess)
	}
	if p.isIdle(now()) {
		rest = askedLess
	}
	return rest
}

// isIdle tells whether nothing was asked of the pool for a while.
func (p *pool) isIdle(t time.Time) bool {
	return t.Unix()-p.used.Load() > int64(idleAfter/time.Second)
}

// dialInfoKey is under which the proxy tells its transport where to dial.
const dialInfoKey = caddy.CtxKey("reverse_proxy.dial_info")

// proxyProtocolKey is under which it says who asks, where the PROXY protocol is
// on.
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

// get makes a GET request of the router's own to a worker.
func (h *Handler) get(ctx context.Context, w *worker, path string) (*http.Response, error) {
	return h.askOwn(ctx, w, http.MethodGet, path, nil, nil)
}

// askOwn makes a request of the router's own to a worker, over the worker's own
// transport. Its key is the worker's, unless the request is made for a client
// that has one.
func (h *Handler) askOwn(ctx context.Context, w *worker, method, path string, body []byte, authorization []string) (*http.Response, error) {
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
	return t.RoundTrip(req)
}
