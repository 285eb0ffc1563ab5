package pool

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// epoch is when the tests' clocks begin.
var epoch = time.Unix(1_800_000_000, 0)

// TestWorkerIsComparedWithTheOthers reports errors of one worker, or of all of them.
func TestWorkerIsComparedWithTheOthers(t *testing.T) {
	for _, all := range []bool{false, true} {
		p := testPool(t, wanted())
		rows := make([]TableRow, 4)
		for i, dial := range []string{"a:1", "b:1", "c:1", "d:1"} {
			rows[i].Worker = p.Worker(dial)
		}
		for n := range uint64(3 * worker.FewErrors) {
			for i, row := range rows {
				o := Outcome{Kind: OutcomeGood, Begun: time.Now()}
				if i == 0 || all {
					o = Outcome{Kind: OutcomeErrored, Begun: time.Now(), Why: "404 Not Found", Blame: n, Peers: rows}
				}
				p.Report(row.Worker, o)
			}
		}
		for i, row := range rows {
			if ok, want := row.Worker.Health.Available(time.Now()), i > 0 || all; ok != want {
				t.Errorf("all answer errors: %v; worker %d is available: %v, want %v", all, i, ok, want)
			}
		}
	}
}

// TestComparisonForgetsOldErrors has three workers. One failed everything before it was drained,
// one gets no requests, and the third one fails now.
func TestComparisonForgetsOldErrors(t *testing.T) {
	a, b, c := new(worker.Worker), new(worker.Worker), new(worker.Worker)
	rows := []TableRow{{Worker: a}, {Worker: b}, {Worker: c}}
	for n := range uint64(40) {
		b.Health.RecordError(epoch, true, n)
	}
	now, worse := epoch.Add(10*time.Minute), false
	for n := range uint64(40) {
		worse = isWorse(a, now, &Outcome{Own: true, Blame: n, Peers: rows})
	}
	if !worse {
		t.Error("the worker that fails is not worse than the others")
	}
}

// TestOutlierIsACondition has one of two workers refuse what different sessions ask.
func TestOutlierIsACondition(t *testing.T) {
	p := testPool(t, wanted())
	targets := []kvscore.Target{p.Worker("a:1").Target(0), p.Worker("b:1").Target(0)}
	sel := kvscore.Selection{Rand: newRandom()}
	now := time.Now()
	for i := range uint64(10) {
		for bound := range targets {
			r := &kvscore.Request{Prompt: cache.Prompt{Tokens: 1600}, Session: i + 1, Streamed: true}
			_, l := p.Scheduler.Select(now, r, targets, bound, nil, &sel)
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
