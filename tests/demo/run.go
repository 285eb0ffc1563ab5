package main

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// contender is one way to run the engines.
type contender struct {
	name   string
	route  directive
	deadly bool // one engine dies
	tells  bool // the client says in a header which conversation it is
}

var contenders = []contender{
	{name: "round_robin", route: reverseProxy("round_robin")},
	{name: "kv_router", route: kvRouter},
	{name: "kv_router, e2 dies", route: kvRouter, deadly: true},
}

// others are contenders for whom the command line has to ask.
var others = []contender{
	{name: "sticky", route: reverseProxy("header " + conversationHeader), tells: true},
	{name: "least_conn", route: reverseProxy("least_conn")},
}

// mortal is the position of the engine that dies.
const mortal = 1

// result is what came of a run.
type result struct {
	contender
	tally
	figures  figures
	requests []int // that each engine received
	// lag is the most that a step of an engine came too late.
	lag time.Duration
	// overhead is what the engines did not see of the mean time from sending a
	// request to its first token.
	overhead    time.Duration
	turns       int           // that there were to answer
	died, lived time.Duration // when an engine died and came back; 0: none did
}

// slack is how much longer than the window a run may take, in real time, and how
// many times as long.
const (
	slack       = time.Minute
	slackFactor = 5
)

// play makes one run, with new engines and a new Caddy.
func play(ctx context.Context, c contender, w *workload, speed float64, tick *ticker) (*result, error) {
	cl, err := startCluster(c.route, speed, false)
	if err != nil {
		return nil, err
	}
	defer cl.stop()
	window := time.Duration(float64(w.window) / speed)
	bounded, cancel := context.WithTimeout(ctx, slack+slackFactor*window)
	defer cancel()
	r := &result{contender: c, turns: w.turns()}
	p := newPlayer(cl.url(), w.system, speed, &r.tally)
	p.tells = c.tells
	stopTicking := tick.run(&r.tally, p)
	var fate sync.WaitGroup
	if c.deadly {
		fate.Go(func() { err = r.fate(bounded, cl, p, w.window) })
	}
	var chatting sync.WaitGroup
	for _, conv := range w.conversations {
		chatting.Go(func() { p.converse(bounded, conv) })
	}
	chatting.Wait()
	fate.Wait()
	stopTicking()
	switch {
	case ctx.Err() != nil:
		return nil, errors.New("interrupted")
	case bounded.Err() != nil:
		return nil, errors.New("the run takes too long; this machine, or the flags, are not made for it")
	case err != nil:
		return nil, err
	}
	r.look(cl)
	return r, nil
}

// fate lets an engine die at a third of the window and come back at two thirds.
func (r *result) fate(ctx context.Context, cl *cluster, p *player, window time.Duration) error {
	e := cl.engines[mortal]
	if !p.wait(ctx, p.zero, window/3) {
		return nil
	}
	r.lag = cl.lag() // of the life that ends
	e.Kill()
	r.died = p.since(p.zero, time.Now())
	if !p.wait(ctx, p.zero, 2*window/3) {
		return nil
	}
	if err := e.Restart(); err != nil {
		return err
	}
	r.lived = p.since(p.zero, time.Now())
	return nil
}

// look asks the engines how it was.
func (r *result) look(cl *cluster) {
	r.lag = max(r.lag, cl.lag())
	first, answered := 0.0, 0
	for _, e := range cl.engines {
		n := 0
		for _, rec := range e.Journal() {
			if rec.Method != http.MethodPost {
				continue
			}
			n++
			if rec.Outcome == engine.Finished {
				first += rec.FirstTokenMS - rec.AtMS
				answered++
			}
		}
		r.requests = append(r.requests, n)
	}
	r.overhead = max(0, r.perAnswer()-milliseconds(first/float64(max(answered, 1))))
	r.figures = summarize(r.samples)
}

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }
