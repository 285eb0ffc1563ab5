package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// sample is one turn that was answered. Times are the engines'.
type sample struct {
	at             time.Duration // when it was asked, since the run's beginning
	ttft           time.Duration // from the first attempt
	own            time.Duration // from the attempt that was answered
	end            time.Duration // of the answer, since the run's beginning
	prompt, cached int           // tokens
}

// run is one contender with one workload.
type run struct {
	contender
	load    *workload
	model   string
	addrs   []string // of the routers
	engines []*engine.Engine

	mu      sync.Mutex
	numbers int // of requests
	whole   map[int]bool
	samples []sample
	failed  int             // requests that ended before their first token
	broken  int             // requests that ended after it, before the end of the answer
	trouble []time.Duration // when these ended
}

func (r *run) next() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.numbers++
	return r.numbers
}

func (r *run) add(s sample) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.samples = append(r.samples, s)
}

// count counts a request that ended at a time.
func (r *run) count(a *answer, at time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case a.err == nil:
		r.whole[a.number] = true
		return
	case a.first.IsZero():
		r.failed++
	default:
		r.broken++
	}
	r.trouble = append(r.trouble, at)
}

// perform plays all runs, and shows every 5 seconds how far they have come.
func (a *arena) perform(ctx context.Context, most time.Duration, speed float64, progress io.Writer) error {
	bounded, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	began, end := time.Now(), make(chan struct{})
	go func() {
		defer close(end)
		a.play(bounded, speed)
	}()
	for tick := time.NewTicker(5 * time.Second); ; {
		select {
		case <-tick.C:
			a.show(progress, time.Since(began), speed)
		case <-end:
			tick.Stop()
			if ctx.Err() != nil {
				return errors.New("interrupted")
			}
			return nil
		}
	}
}

// show writes one line.
func (a *arena) show(w io.Writer, passed time.Duration, speed float64) {
	answered, all, failed := 0, 0, 0
	for _, r := range a.runs {
		r.mu.Lock()
		answered, failed = answered+len(r.samples), failed+r.failed+r.broken
		r.mu.Unlock()
		all += r.load.requests()
	}
	fmt.Fprintf(w, "%2.0f s (%.0f s of the engines): %d of %d requests answered, %d failed attempts of all contenders\n",
		passed.Seconds(), passed.Seconds()*speed, answered, all, failed)
}

// play plays all runs at the same moment, so that what else this machine does hits
// all of them alike. Unanswered requests are given up when ctx ends.
func (a *arena) play(ctx context.Context, speed float64) {
	players := make([]*player, len(a.runs))
	for i, r := range a.runs {
		r.whole = make(map[int]bool)
		players[i] = newPlayer(r, speed)
		defer players[i].http.CloseIdleConnections()
	}
	zero := time.Now()
	var all sync.WaitGroup
	for _, p := range players {
		p.zero = zero
		for i := range p.load.deaths {
			all.Go(func() { p.fate(ctx, i) })
		}
		if p.load.inTurn {
			all.Go(func() { p.converseInTurn(ctx) })
			continue
		}
		for _, c := range p.load.sessions {
			all.Go(func() { p.converse(ctx, c) })
		}
	}
	all.Wait()
}

// death returns when engine i dies, downtime how long each engine is dead.
func (w *workload) death(i int) time.Duration {
	return w.window * time.Duration(i+1) / time.Duration(w.deaths+1)
}
func (w *workload) downtime() time.Duration { return w.window / time.Duration(2*(w.deaths+1)) }

// fate lets an engine die and come back.
func (p *player) fate(ctx context.Context, i int) {
	if !p.wait(ctx, p.zero, p.load.death(i)) {
		return
	}
	p.engines[i].Kill()
	if !p.wait(ctx, p.zero, p.load.death(i)+p.load.downtime()) {
		return
	}
	p.engines[i].Restart() //nolint:errcheck // without it the engine stays dead for all to see
}

// journal calls f with each inference request that an engine of the run received.
func (r *run) journal(f func(*engine.Record)) {
	for _, e := range r.engines {
		for _, rec := range e.Journal() {
			if rec.Method == http.MethodPost {
				f(&rec)
			}
		}
	}
}

// outside returns how much of the mean time to first token the engines do not see:
// what the router, the client and this machine take.
func (r *run) outside() time.Duration {
	inside, answered := 0.0, 0
	r.journal(func(rec *engine.Record) {
		if rec.Outcome == engine.Finished {
			inside += rec.FirstTokenMS - rec.AtMS
			answered++
		}
	})
	var own time.Duration
	for _, s := range r.samples {
		own += s.own
	}
	if answered == 0 || len(r.samples) == 0 {
		return 0
	}
	return max(0, own/time.Duration(len(r.samples))-time.Duration(inside/float64(answered)*float64(time.Millisecond)))
}

// survivors counts the requests that had no token yet on an engine that died. It returns
// how many of these got a whole answer, and how many there were.
func (r *run) survivors() (saved, of int) {
	r.journal(func(rec *engine.Record) {
		number, err := strconv.Atoi(rec.Header.Get(requestHeader))
		if err != nil || rec.Life != 1 || rec.Outcome != engine.Broken || rec.AnswerTokens > 0 {
			return
		}
		if of++; r.whole[number] {
			saved++
		}
	})
	return saved, of
}
