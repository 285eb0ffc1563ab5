package handler

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// unmarshalLimit reads a line such as "limit tokens 2M per 1m", "limit file <path>" or
// "limit cached_weight 0.1".
func (h *Handler) unmarshalLimit(d *caddyfile.Dispenser) error {
	if h.Limits == nil {
		h.Limits = new(pool.Limits)
	}
	switch l, args := h.Limits, d.RemainingArgs(); {
	case len(args) == 2 && args[0] == "file":
		if l.File != "" {
			return d.Err("limit file already specified")
		}
		l.File = args[1]
		return nil
	case len(args) == 2 && args[0] == "cached_weight":
		w, err := strconv.ParseFloat(args[1], 64)
		if err != nil || !(w >= 0 && w <= 1) {
			return d.Errf("limit cached_weight: must be between 0 and 1, got '%s'", args[1])
		}
		l.CachedWeight = &w
		return nil
	default:
		return addLimit(d, &l.Default, args)
	}
}

// addLimit adds the limit of a line such as "limit tokens 2M per 1m".
func addLimit(d *caddyfile.Dispenser, to *[]quota.Limit, args []string) error {
	l, err := quota.ParseLimit(strings.Join(args, " "))
	if err != nil {
		return d.WrapErr(err)
	}
	*to = append(*to, l)
	return nil
}

// reserve reserves what a request may use of its tenant's limits. The error is a refusal.
func (h *Handler) reserve(w http.ResponseWriter, p *plan.Plan, now time.Time) (*quota.Reservation, error) {
	if !p.Infers() || !h.pool.Quota.Limits() {
		return nil, nil //nolint:nilnil // a nil reservation limits nothing
	}
	res, exceeded := h.pool.Quota.Reserve(now, h.asks(p))
	if exceeded == nil {
		if res != nil {
			res.Headers(w.Header().Set)
		}
		return res, nil
	}
	exceeded.Headers(w.Header().Set)
	if repl, ok := p.HTTP.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Map(p.Placeholder) // for the access log
	}
	h.pool.Raise(now, "tenants have reached their limits, and the router refuses their requests", fmt.Errorf("tenant %q: %w", exceeded.Tenant, exceeded))
	h.pool.Outcomes.Count(now, p.ClassName(), api.CodeLimit)
	if exceeded.First {
		h.pool.Logger().Warn("a tenant has reached a limit", zap.String("tenant", exceeded.Tenant),
			zap.Stringer("limit", exceeded.Limit), zap.Duration("wait", exceeded.Wait))
	}
	wait := math.Ceil(exceeded.Wait.Seconds())
	return nil, &api.Refusal{
		API: plan.OrUnplanned(p.API), Status: http.StatusTooManyRequests, Code: api.CodeLimit, Err: exceeded, RetryAfter: int(wait),
	}
}

func (h *Handler) asks(p *plan.Plan) *quota.Ask {
	ask := &quota.Ask{Name: p.Tenant.Name, Tenant: p.Tenant.Hash, Class: p.ClassName(), Prompt: p.Score.Tokens}
	if p.API != nil && p.API.Work() == api.Generate {
		ask.Choices = 1
	}
	if req := p.Request; req != nil && ask.Choices > 0 {
		ask.Choices, ask.Answer = req.Choices, req.MaxTokens
	}
	return ask
}

// charge charges what a request has used. Without a report, it was not dispatched.
func (h *Handler) charge(res *quota.Reservation, report *dispatch.Report) {
	if report == nil {
		res.Drop(time.Now())
	} else if now := time.Now(); !report.Charge(now, res) {
		h.pool.Raise(now, "engines report impossible numbers of tokens: estimates count for the limits of tenants")
	}
}
