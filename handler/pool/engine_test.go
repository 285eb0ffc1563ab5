package pool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"go.uber.org/zap"

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
	p.Report(w, worker.Outcome{Kind: worker.OutcomeRefused, Begun: time.Now()})
	p.Report(w, worker.Outcome{Kind: worker.OutcomeRefused, Begun: time.Now()})
	if load := p.Load(time.Now(), w); load.CachedTokens != 0 {
		t.Errorf("load of both ranks %+v", load)
	}
	if w.Health.Available(time.Now()) {
		t.Error("it is not marked down")
	}
	p.Report(w, worker.Outcome{Kind: worker.OutcomeAnswered, Begun: time.Now()}) // and asks it again at once
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
		for range 3 {
			p.RecordOwnRequest(t.Context(), w, 0, err)
			p.Report(w, worker.Unanswered(err))
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
	w.Connected(time.Now())
	if s := w.Health.State(time.Now()); w.Health.Available(time.Now()) || !s.Away {
		t.Errorf("a connection makes it well: %+v", s)
	}
	if n := p.cached(w); n != 1600 {
		t.Errorf("%d tokens are thought to be there, want 1600", n)
	}
	p.Report(w, worker.Outcome{Kind: worker.OutcomeAnswered, Begun: time.Now()})
	if s := w.Health.State(time.Now()); !w.Health.Available(time.Now()) || !s.Well || s.Away {
		t.Errorf("an answer does not make it well: %+v", s)
	}
}

// epoch is when the tests' clocks begin.
var epoch = time.Unix(1_800_000_000, 0)

// TestOutlierIsACondition has one of two workers refuse what different sessions ask.
func TestOutlierIsACondition(t *testing.T) {
	p := testPool(t, wanted())
	targets := []kvscore.Target{p.Worker("a:1").Target(0), p.Worker("b:1").Target(0)}
	sel := kvscore.Selection{Rand: newRandom()}
	now := time.Now()
	for i := range uint64(10) {
		for bound := range targets {
			r := &kvscore.Request{Prompt: cache.Prompt{Tokens: 1600}, Session: i + 1, Streamed: true}
			_, l := p.Scheduler.Select(now, r, p.Scheduler.Refs(targets...), bound, nil, &sel)
			if bound == 0 {
				l.Failed(now)
			} else {
				l.FirstToken(now.Add(time.Second))
			}
			l.End(bound == 1, nil)
		}
	}
	if p.noteOutliers(now); len(p.Incidents.Open(now)) != 1 {
		t.Errorf("conditions %+v", p.Incidents.Open(now))
	}
}

// TestPairs avoids pairs whose transfers fail, and not those of which one was late.
func TestPairs(t *testing.T) {
	p, now := new(Pairs), time.Now()
	prefill, decode, other := &worker.Worker{ID: 1}, &worker.Worker{ID: 2}, &worker.Worker{ID: 3}
	for i, silent := range []bool{true, true, true} {
		if p.Avoid(prefill, decode, now) {
			t.Errorf("avoided after %d silent phases", i)
		}
		p.Failed(prefill, decode, silent, now, now)
	}
	if !p.Avoid(prefill, decode, now) || p.Avoid(prefill, other, now) || p.Avoid(prefill, decode, now.Add(pairAvoided)) {
		t.Error("three silent phases in a row")
	}
	p.Work(prefill, decode)
	if p.Avoid(prefill, decode, now) || p.Failed(prefill, decode, true, now, now) || !p.Failed(prefill, decode, false, now, now) {
		t.Error("a failed transfer, after one that went well and a late one")
	}

	p = new(Pairs)
	prefill.Restarted()
	if p.Failed(prefill, decode, false, now, time.Now()) || p.Avoid(prefill, decode, now) {
		t.Error("a transfer from before the restart")
	}
	if now = time.Now(); !p.Failed(prefill, decode, false, now, now) {
		t.Error("a transfer after the restart")
	}
}

// TestEventsAreOfTheLog writes log lines, and looks at the events.
func TestEventsAreOfTheLog(t *testing.T) {
	p := &log{"test", make(chan event, 1)}
	log := p.Logger()
	log.Info("worker is well")
	log.Debug("condition begins")
	for range 3 { // more than have room
		log.Warn("worker is marked down", zap.String("upstream", "a:1"))
	}
	e := <-p.events
	if e.name != "kv_router_worker_marked_down" || e.data["pool"] != p.Name || e.data["upstream"] != "a:1" || len(p.events) != 0 {
		t.Errorf("got %+v", e)
	}
}

// TestEventsHaveLogLines looks for the log lines of all events in the code.
func TestEventsHaveLogLines(t *testing.T) {
	var code strings.Builder
	files, _ := filepath.Glob("../*/*.go")
	for _, name := range files {
		if !strings.HasSuffix(name, "_test.go") && filepath.Base(name) != "events.go" {
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			code.Write(data)
		}
	}
	for line := range events {
		if !strings.Contains(code.String(), `"`+line+`"`) {
			t.Errorf("no code logs %q", line)
		}
	}
}

func TestAborts(t *testing.T) {
	var a Aborts
	begun := time.Now()
	at := begun.Add(time.Second)
	a.Note(at, "request-1")
	for _, v := range []struct {
		after time.Duration
		begun time.Time
		id    string
		want  bool
	}{
		{time.Second, begun, "request-1", true},
		{time.Second, begun, "request-12", true}, // as SGLang reads it
		{time.Second, begun, "request-2", false},
		{time.Second, begun, "", false},
		{time.Second, at.Add(1), "request-1", false}, // a later one of that name
		{2 * abortLasts, begun, "request-1", false},
	} {
		if got := a.Has(at.Add(v.after), v.begun, v.id); got != v.want {
			t.Errorf("%+v: %v", v, got)
		}
	}
	for i := range 3 * maxAborts {
		a.Note(at, fmt.Sprint(i))
	}
	if len(a.ids) > maxAborts {
		t.Errorf("%d ids are kept", len(a.ids))
	}
	a.Note(at, "")
	if !a.Has(at, begun, "any") || a.Has(at, at, "any") {
		t.Error("all that had begun are aborted")
	}
}
