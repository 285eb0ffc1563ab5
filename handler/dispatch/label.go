package dispatch

import (
	"net/http"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
)

const serverTiming = "Server-Timing"

// label adds the headers that say how an attempt's request was routed, as far as the operator shows it.
func (d *Dispatch) label(a *attempt.Attempt, resp *http.Response) {
	a.Label(resp.Header)
	if d.ServerTiming {
		queued := d.wait.waited
		resp.Header.Add(serverTiming, timing("queue", queued)+", "+timing("route", a.Begun.Sub(d.start)-queued)+", "+
			timing("engine", time.Since(a.Begun)))
	}
	if d.CacheStatus {
		resp.Header.Add("Cache-Status", d.cacheStatus(a))
	}
}

// timing returns a metric of a Server-Timing field (W3C Server Timing, 3), in milliseconds.
func timing(name string, t time.Duration) string {
	return name + ";dur=" + strconv.FormatFloat(float64(t)/float64(time.Millisecond), 'f', 1, 64)
}

// cacheStatus returns a member of a Cache-Status field (RFC 9211) for the KV cache of the worker that computes
// the prompt.
func (d *Dispatch) cacheStatus(a *attempt.Attempt) string {
	by, status := a.Computes(), "hit"
	switch {
	case d.plan.Request == nil:
		return "kv_router;fwd=bypass"
	case by.Terms.OverlapTokens == 0:
		status = "fwd=miss"
	}
	return "kv_router;" + status + ";detail=" + a.Reason + ";kv-cached-tokens=" + strconv.FormatInt(by.Terms.OverlapTokens, 10) +
		";kv-prompt-tokens=" + strconv.FormatInt(by.Tokens, 10)
}
