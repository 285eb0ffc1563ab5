package plan

import (
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// longestTimeout is how long a client may ask a session or its cache to be kept, unless
// the operator keeps sessions for longer.
const longestTimeout = time.Hour

func (rd *Reader) extOptions() nvext.Options {
	longest := max(longestTimeout, rd.TTL())
	return nvext.Options{Strict: rd.Strict, MinTimeout: time.Second, MaxTimeout: longest, MaxRetention: longest}
}

// NoExt is what most requests say. It is shared and never changes.
var NoExt nvext.Ext

// extend reads what a request says to the router, as far as it is granted. raw is the
// body's nvext, nil if there is none or the body was not read. Headers override it.
func (rd *Reader) extend(r *http.Request, p *Plan, raw []byte) error {
	p.Ext, p.headers = &NoExt, headersNeed(r.Header)
	if raw != nil || p.headers != 0 || p.steers() {
		if err := rd.takeExt(r, p, raw); err != nil {
			return &api.Refusal{API: p.API, Status: http.StatusBadRequest, Code: api.CodeNVExt, Param: "nvext", Err: err}
		}
		if err := p.takePin(); err != nil {
			return &api.Refusal{API: p.API, Status: http.StatusBadRequest, Code: api.CodePin, Param: "nvext", Err: err}
		}
	}
	if rd.Direct && !p.Pin.Named && (p.API != nil || infersUnplanned(r)) {
		return &api.Refusal{API: OrUnplanned(p.API), Status: http.StatusBadRequest, Code: api.CodePin, Param: "nvext", Err: errDirect}
	}
	return nil
}

// takeExt reads nvext and routing headers, and drops what is not granted.
func (rd *Reader) takeExt(r *http.Request, p *Plan, raw []byte) (err error) {
	ext := new(nvext.Ext)
	p.Ext = ext
	if raw != nil {
		if *ext, err = nvext.Parse(raw, rd.extOptions()); err != nil {
			return err
		}
	}
	if p.headers != 0 {
		p.Malformed = ext.ApplyHeaders(func(name string) (string, bool) {
			if values := r.Header[name]; len(values) > 0 {
				return oneValue(values), true
			}
			return "", false
		})
	}
	if p.steers() || p.headers|ext.Needs() != 0 {
		p.Grants = rd.Grants(r)
	}
	if p.Dropped, err = ext.Restrict(p.Grants); err != nil {
		return err
	}
	p.Dropped |= p.headers &^ p.Grants
	if ext.QueryOnly() { // its answer repeats them
		ext.TokenData = nvext.AppendIDs(nil, raw, ext.TokenSpan)
	}
	p.honour()
	return nil
}

// honour tells the scheduler what the client wishes.
func (p *Plan) honour() {
	p.Score.ExpectedTokens = int64(p.Ext.AgentHints.OSL.Value)
	p.Score.Priority = priority(&p.Ext.AgentHints)
	o := &p.Ext.Override
	if *o == (nvext.RouterConfigOverride{}) {
		return
	}
	p.Score.Override = &kvscore.Override{
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
