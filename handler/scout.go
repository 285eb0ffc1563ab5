package handler

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	// lookEvery is how often the workers are asked for their models.
	lookEvery = 5 * time.Second
	// lookTimeout is how long a worker may take to tell.
	lookTimeout = 2 * time.Second
	// firstLook is how long the first requests wait for what the workers tell.
	firstLook = time.Second
)

// scout asks the workers which models they serve, from the handler's first
// request until its end.
type scout struct {
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
			}
		}
	}()
}

// awaitFirstLook waits until it is known which models the workers serve, at
// most for firstLook. It returns at once but for the first requests.
func (h *Handler) awaitFirstLook(ctx context.Context) {
	if h.ctx == nil {
		return
	}
	select {
	case <-h.scout.first:
		return
	default:
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
func (h *Handler) look(ctx context.Context, first bool) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	done := make(chan struct{})
	asked := 0
	for _, w := range h.pool.all() {
		last := w.asked.Load()
		if t := now().UnixNano(); !first && t-last < int64(lookEvery)/2 || !w.asked.CompareAndSwap(last, t) {
			continue // another handler of the pool has just asked it
		}
		asked++
		go func() {
			defer func() { done <- struct{}{} }()
			h.ask(ctx, w)
		}()
	}
	for range asked {
		<-done
	}
}

// dialInfoKey is under which the proxy tells its transport where to dial.
const dialInfoKey = caddy.CtxKey("reverse_proxy.dial_info")

var errNoDial = errors.New("the address has placeholders, or is not one socket")

// get makes a request of the router's own to a worker, over the worker's own
// transport.
func (h *Handler) get(ctx context.Context, w *worker, path string) (*http.Response, error) {
	if strings.Contains(w.dial, "{") {
		return nil, errNoDial
	}
	addr, err := caddy.ParseNetworkAddress(w.dial)
	if err != nil {
		return nil, err
	}
	if addr.PortRangeSize() != 1 && !addr.IsUnixNetwork() {
		return nil, errNoDial
	}
	t := h.ReverseProxy.Transport.(*transport).HTTPTransport
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
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+host+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	req.URL.Scheme = "" // the transport knows it
	req.Header.Set("User-Agent", "kv_router")
	req.Close = true // connections are for clients' requests
	if key := h.pool.settings.Load().worker(w.dial).APIKey; key != "" {
		req.Header.Set("Authorization", "Bearer "+repl.ReplaceAll(key, ""))
	}
	if ops := t.RequestHeaderOps(); ops != nil {
		ops.ApplyToRequest(req)
	}
	return t.RoundTrip(req)
}
