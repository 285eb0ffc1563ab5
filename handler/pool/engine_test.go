package pool

import (
	"context"
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// tell reports a worker's engine to the pool.
func (p *Pool) tell(dial string, told engine.Info) *worker.Worker {
	w := p.Worker(dial)
	p.SetInfo(w, told)
	return w
}

// TestMirrorIsClearedOnAllRanks clears, and tells of it only if there was
// anything.
func TestMirrorIsClearedOnAllRanks(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", DPSize: 2}))
	w := p.Worker("a:1")
	w.BeginProbe(time.Now(), 0, 0)
	w.EndProbe()
	p.serve(w).End(true, nil)
	if load := p.Load(time.Now(), w); load.CachedTokens != 1600 || load.CapacityTokens != 2*262144 {
		t.Errorf("load of both ranks %+v", load)
	}
	p.RecordOwnRequest(t.Context(), w, 0, reverseproxy.NewDialError(errors.New("dial tcp: i/o timeout")))
	if got := p.cached(w); got != 1600 {
		t.Errorf("%d tokens are cached after a timeout, want 1600", got)
	}
	p.Report(w, Outcome{Kind: OutcomeRefused, Begun: time.Now()})
	p.Report(w, Outcome{Kind: OutcomeRefused, Begun: time.Now()})
	if load := p.Load(time.Now(), w); load.CachedTokens != 0 {
		t.Errorf("load of both ranks %+v", load)
	}
	if w.Health.Available(time.Now()) {
		t.Error("it is not marked down")
	}
	p.Report(w, Outcome{Kind: OutcomeAnswered, Begun: time.Now()}) // and asks it again at once
	soon, _ := w.BeginProbe(time.Now(), time.Hour, 0)
	if !w.Health.Available(time.Now()) || !soon {
		t.Error("it is still marked down, or not asked again")
	}
}

// TestOwnLimitsMarkNobodyDown has the router run out of what a connection needs, for a client's request
// and for questions of its own.
func TestOwnLimitsMarkNobodyDown(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}))
	w := p.Worker("a:1")
	for _, text := range []string{
		"dial tcp 10.0.0.1:8000: socket: too many open files", "dial tcp: lookup gpu-1: dial udp: socket: too many open files in system",
		"dial tcp 10.0.0.1:8000: connect: cannot assign requested address", "dial tcp 10.0.0.1:8000: socket: no buffer space available",
	} {
		err := reverseproxy.NewDialError(errors.New(text))
		if !Limited(err) {
			t.Errorf("%v: the worker is blamed", err)
		}
		for range 3 {
			p.RecordOwnRequest(t.Context(), w, 0, err)
			p.Report(w, Outcome{Kind: OutcomeLimited, Begun: time.Now(), Why: text})
		}
	}
	if s := w.Health.State(time.Now()); !s.Well || s.Away || len(p.Incidents.Open(time.Now())) != 1 {
		t.Errorf("health %+v, conditions %+v", s, p.Incidents.Open(time.Now()))
	}
}

// TestUnansweredQuestionsMarkDown has a worker accept connections and answer no
// question. One may be lost; a worker that sends tokens may be busy. Its cache is
// not gone.
func TestUnansweredQuestionsMarkDown(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}))
	w := p.Worker("a:1")
	p.serve(w).End(true, nil)
	ask := func(err error) {
		status := http.StatusOK
		if err != nil {
			status = 0
		}
		p.RecordOwnRequest(t.Context(), w, status, err)
	}
	progressed(w, time.Now())
	for range 3 {
		ask(io.EOF)
	}
	if !w.Health.Available(time.Now()) {
		t.Error("a busy worker is marked down")
	}
	progressed(w, time.Now().Add(-worker.ProbeEvery))
	for _, err := range []error{io.EOF, nil, io.ErrUnexpectedEOF} {
		ask(err)
		if !w.Health.Available(time.Now()) {
			t.Errorf("marked down after one question: %v", err)
		}
	}
	ask(context.DeadlineExceeded)
	if s := w.Health.State(time.Now()); w.Health.Available(time.Now()) || !s.Away {
		t.Errorf("not marked down after two questions: %+v", s)
	}
	p.Connected(w)
	if s := w.Health.State(time.Now()); w.Health.Available(time.Now()) || !s.Away {
		t.Errorf("a connection makes it well: %+v", s)
	}
	if n := p.cached(w); n != 1600 {
		t.Errorf("%d tokens are thought to be there, want 1600", n)
	}
	p.Report(w, Outcome{Kind: OutcomeAnswered, Begun: time.Now()})
	if s := w.Health.State(time.Now()); !w.Health.Available(time.Now()) || !s.Well || s.Away {
		t.Errorf("an answer does not make it well: %+v", s)
	}
}
