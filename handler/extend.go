package handler

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

// longestTimeout is how long a client may ask a session or its cache to be kept,
// if sessions are not kept longer anyway.
const longestTimeout = time.Hour

// extOptions returns how nvext is read: a session's timeout and a cache's ttl are
// moved into the bounds of a second and the longer of an hour and the affinity's
// ttl.
func (h *Handler) extOptions() nvext.Options {
	longest := max(longestTimeout, h.pool.settings.Load().ttl)
	return nvext.Options{
		Strict:     h.NVExt == nvextStrict,
		MinTimeout: time.Second, MaxTimeout: longest, MaxRetention: longest,
	}
}

// extend takes in what a request says to the router, as far as its client is
// trusted. raw is the nvext of its body, nil if there is none or the body was
// not read; headers win over it.
func (h *Handler) extend(r *http.Request, a api.API, p *plan, raw []byte) error {
	p.ext, p.headers = &noExt, headersNeed(r.Header)
	if raw != nil || p.headers != 0 || p.steers() {
		if err := h.takeExt(r, p, raw); err != nil {
			return &api.Refusal{API: a, Status: http.StatusBadRequest, Code: api.CodeNVExt, Param: "nvext", Err: err}
		}
		if err := p.takePin(); err != nil {
			return &api.Refusal{API: a, Status: http.StatusBadRequest, Code: api.CodePin, Param: "nvext", Err: err}
		}
	}
	if h.Mode == modeDirect && !p.pin.named && (a != nil || infersUnplanned(r)) {
		return &api.Refusal{API: orUnplanned(a), Status: http.StatusBadRequest, Code: api.CodePin, Param: "nvext", Err: errDirect}
	}
	return nil
}

// noExt is what most requests say. It is shared, and never changed.
var noExt nvext.Ext

// takeExt reads what the request says, and drops what its client is not
// trusted with.
func (h *Handler) takeExt(r *http.Request, p *plan, raw []byte) error {
	ext := new(nvext.Ext)
	p.ext = ext
	if raw != nil {
		var err error
		if *ext, err = nvext.Parse(raw, h.extOptions()); err != nil {
			return err
		}
	}
	if p.headers != 0 {
		p.malformed = ext.ApplyHeaders(func(name string) (string, bool) {
			if values := r.Header[name]; len(values) > 0 {
				return oneValue(values), true
			}
			return "", false
		})
	}
	if p.steers() || p.headers|ext.Needs() != 0 {
		p.grants = h.grants(r)
	}
	var err error
	if p.dropped, err = ext.Restrict(p.grants); err != nil {
		return err
	}
	p.dropped |= p.headers &^ p.grants
	if ext.QueryOnly() { // which wants them back
		ext.TokenData = nvext.AppendIDs(nil, raw, ext.TokenSpan)
	}
	p.honour()
	return nil
}

// oneValue returns a header's value. Of several that differ, of which a gateway
// has added one, none wins: together they are a number no more, and a tenant of
// their own (RFC 9110, 5.3).
func oneValue(values []string) string {
	for _, v := range values[1:] {
		if v != values[0] {
			return strings.Join(values, ", ")
		}
	}
	return values[0]
}

// mustRead refuses a request whose body the router could not read, if the request
// is a tenant's or cache_salt is enforced: the body could name another tenant's
// cache or session. All other unread bodies pass, whatever they say.
func (h *Handler) mustRead(a api.API, p *plan) error {
	if p.unread == "" || p.ext.Tenant == "" && h.CacheSalt != saltEnforce {
		return nil
	}
	status := http.StatusBadRequest
	switch p.unread {
	case fallbackOversized:
		status = http.StatusRequestEntityTooLarge
	case fallbackMemory:
		status = http.StatusServiceUnavailable
	}
	return &api.Refusal{API: orUnplanned(a), Status: status, Code: api.CodeUnreadable, Err: fmt.Errorf(
		"the router must read the body, as the request is a tenant's or cache_salt is enforced, and cannot (%s)", p.unread)}
}

// honour takes in what the scheduler is to know of the client's wishes.
func (p *plan) honour() {
	p.score.ExpectedTokens = int64(p.ext.AgentHints.OSL.Value)
	p.score.Priority = priority(&p.ext.AgentHints)
	o := &p.ext.Override
	if *o == (nvext.RouterConfigOverride{}) {
		return
	}
	p.score.Override = &kvscore.Override{
		OverlapScoreCredit: finite(o.OverlapScoreCredit), PrefillLoadScale: finite(o.PrefillLoadScale),
		Temperature: finite(o.RouterTemperature), AssumeKVReuse: pointer(o.AssumeKVReuse),
		TrackPrefillTokens: pointer(o.TrackPrefillTokens),
	}
}

// priority returns what the request's own time is worth against others' time: above
// 0, more.
func priority(h *nvext.AgentHints) int {
	switch {
	case h.StrictPriority.Value > 0:
		return 1
	case h.Priority.Set:
		return int(h.Priority.Value)
	case h.LatencySensitivity.Value > 0:
		return 1
	}
	return 0
}

// maxOverride keeps costs finite.
const maxOverride = 1e6

// finite is pointer for an option of a policy.
func finite(o nvext.Opt[float64]) *float64 {
	o.Value = min(o.Value, maxOverride)
	return pointer(o)
}

// pointer returns nil for what is not set.
func pointer[T any](o nvext.Opt[T]) *T {
	if !o.Set {
		return nil
	}
	return &o.Value
}

// countDropped counts what was dropped of a request, and what nobody could
// read. A plan that only explains counts nothing.
func (d *dispatcher) countDropped(p *plan) {
	for name := range p.dropped.Names {
		d.metrics.dropped.WithLabelValues(d.pool.name, name).Inc()
	}
	for _, name := range p.malformed {
		d.metrics.malformed.WithLabelValues(d.pool.name, name).Inc()
	}
	if p.dropped == 0 && len(p.malformed) == 0 {
		return
	}
	if c := d.logger.Check(zap.DebugLevel, "wishes of a client are dropped"); c != nil {
		c.Write(zap.Stringer("not_granted", p.dropped), zap.Strings("malformed_headers", p.malformed))
	}
}

// noticeIneffective records wishes that are granted but without effect, because the
// policy does not heed them.
func (rt *route) noticeIneffective() {
	p := rt.plan
	if p.score.Override == nil && p.ext.RoutingConstraints.PreferredTaints == nil {
		return
	}
	switch kvscore.CostUnit(rt.active) {
	case kvscore.UnitMilliseconds, kvscore.UnitBlocks: // policies that weigh these
	default:
		rt.pool.incidents.met(rt.start, "preferred taints or overrides without effect under this policy", rt.pool.logger)
	}
}
