package pool

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// TestQueuedRequestsFollowTheSource changes the upstreams of a source that follows them while a
// request waits, because there are no upstreams or because they are full.
func TestQueuedRequestsFollowTheSource(t *testing.T) {
	for name, c := range map[string]struct {
		kind          worker.AttemptKind
		before, after []string // the request is offered
		want          string
		err           error
		within        time.Duration
	}{
		"the first upstream comes":       {worker.KindStream, nil, []string{"b:1"}, "b:1", nil, 2 * time.Second},
		"none comes":                     {worker.KindStream, nil, nil, "", ErrWaited, time.Minute},
		"another comes beside full ones": {worker.KindStream, []string{"a:1"}, []string{"a:1", "b:1"}, "b:1", nil, 2 * time.Second},
		"another replaces the full one":  {worker.KindStream, []string{"a:1"}, []string{"b:1"}, "b:1", nil, 2 * time.Second},
		"the full one goes":              {worker.KindStream, []string{"a:1"}, nil, "", ErrWaited, time.Minute},
		"takes no slot":                  {worker.KindOther, nil, []string{"b:1"}, "", ErrNoWorker, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, workers, _ := limited(t, 1, 1)
				full, s := p.seatOn(workers[0]), new(Seat)
				tables := new(Tables)
				began := time.Now()
				o, later := tables.Offers(p, upstreamsOf(c.before...), nil), tables.Offers(p, upstreamsOf(c.after...), nil)
				first := o
				want := anyWorker
				want.Kind = c.kind
				waited, err := p.Seat(t.Context(), &want, &o, &chooser{renew: func() Offers {
					if time.Since(began) < time.Second {
						return first
					}
					return later
				}}, s)
				if !errors.Is(err, c.err) || waited > c.within {
					t.Fatalf("error %v after %s, want %v within %s", err, waited, c.err, c.within)
				}
				if err == nil && (s.Worker.Dial != c.want || s.Upstream.Dial != c.want || !slices.Contains(o.workers(), s.Worker)) {
					t.Errorf("got %s, want %s", s.Worker.Dial, c.want)
				}
				s.Leave(true, nil)
				full.Leave(true, nil)
				if p.Scheduler.Stats().Leases != 0 || p.Waiting() != 0 {
					t.Error("something is left")
				}
			})
		})
	}
}
