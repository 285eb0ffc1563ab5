package dispatch

import (
	"context"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// SeatPrefill implements split.Owner.
func (d *Dispatch) SeatPrefill(ctx context.Context, want *pool.Wants, by pool.Chooser, p *attempt.Attempt) error {
	offers := d.offers
	if err := d.reserve(ctx, want, &offers, by, p); err != nil {
		return err
	}
	d.begin(p, d.reasonOf(false, &p.Terms))
	return nil
}

// Prefilled implements split.Owner.
func (d *Dispatch) Prefilled(p *attempt.Attempt, c response.Counts) {
	o := &delivery{d: d, attempt: p}
	o.Counts = c
	kind := worker.ReportKind{API: d.plan.API.Name()}
	o.learnPrompt(p.Worker.CachedTokens(kind, c.Cached))
}

// PhaseEnded implements split.Owner.
func (d *Dispatch) PhaseEnded(name string, err error, took time.Duration) {
	d.PoolMetrics.leg(name, err, took)
}

// MayRetry implements split.Owner.
func (d *Dispatch) MayRetry() bool { return d.mayGoOnTrying() && d.Pool.MayRetry(time.Now()) }
