package pool

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// TestPromisesAreChecked has late requests refused only while the predictions of their class are known to
// be right.
func TestPromisesAreChecked(t *testing.T) {
	var p Promises
	class := &queue.Class{Name: "chat", Late: queue.Refuse}
	now := time.Unix(1, 0)
	compare := func(n int, predicted, actual time.Duration) {
		for range n {
			p.Compare("chat", time.Second, predicted, actual, now)
		}
	}
	doubts := func(when, want string) {
		t.Helper()
		if got := p.doubts(class, now); got != want {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	doubts("at first", unchecked)
	compare(9, time.Second, time.Second)
	doubts("with few samples", unchecked)
	compare(1, 1500*time.Millisecond, time.Second)
	doubts("with enough", "")
	compare(100, time.Millisecond, 90*time.Millisecond)
	doubts("with errors that do not matter", "")
	compare(100, 10*time.Second, 3*time.Second)
	doubts("with errors beyond the target", "")
	compare(100, 1500*time.Millisecond, 600*time.Millisecond)
	doubts("with predictions of 2.5 times", incidentOff)
	class.Tolerance = 3
	doubts("with more tolerance", "")
	class.Tolerance = 0
	compare(100, 400*time.Millisecond, time.Second)
	doubts("with predictions of 0.4 times", incidentOff)
	compare(100, time.Second, time.Second)
	doubts("after good ones", "")
	now = now.Add(checkEvery)
	doubts("after a while", unchecked)
	p.checks("chat", now)
	doubts("after one was served", "")
	doubts("another class", "")
	if got := p.doubts(&queue.Class{Name: "other"}, now); got != unchecked {
		t.Errorf("another class: %q", got)
	}
}

// TestFloodBeforeTimesAreLearned has many long prompts come to a new pool, of a class that refuses late requests. Few go
// to the engines at a time. Those whose time is up are refused, also if the queue is shorter than the flood.
func TestFloodBeforeTimesAreLearned(t *testing.T) {
	for _, most := range []int{1000, 50} {
		synctest.Test(t, func(t *testing.T) {
			r := roomOf(t, HoldAuto, usual(), usual())
			set := *r.Settings.Load()
			set.MaxWaiting, set.Targets = most, map[string]bool{"chat": true}
			r.Apply(set.WithDefaults())
			const target = 2 * time.Second
			want := Wants{Class: &queue.Class{Name: "chat", TTFT: target, Late: queue.Refuse}, Deadline: time.Now().Add(target)}
			var served, late, refused, full atomic.Int32
			var clients sync.WaitGroup
			for i := range 300 {
				clients.Go(func() {
					took, err := r.ask(t.Context(), want, &load{tokens: 8000}, uint64(i+1)) //nolint:gosec // small
					switch _, isLate := errors.AsType[*LateError](err); {
					case isLate:
						refused.Add(1)
					case errors.Is(err, ErrQueueFull):
						full.Add(1)
					case err != nil:
						t.Error(err)
					case took > target+time.Second:
						late.Add(1)
					default:
						served.Add(1)
					}
				})
			}
			synctest.Wait()
			if n := r.Scheduler.Stats().Leases; n > 4 {
				t.Errorf("%d requests are in two engines", n)
			}
			clients.Wait()
			t.Logf("%d served, %d much too late, %d refused, %d have no room in the queue", served.Load(), late.Load(), refused.Load(), full.Load())
			if served.Load() < 8 || late.Load() > 0 || (full.Load() > 0) != (most < 300) {
				t.Error("the flood is not served as far as the target allows")
			}
		})
	}
}

// long has a prompt that takes half a minute.
type long struct{ chooser }

func (l *long) Choose(ctx context.Context, among *Candidates) Choice {
	choice := l.chooser.Choose(ctx, among)
	choice.Request = &kvscore.Request{Prompt: cache.Prompt{Tokens: 1e6}, Streamed: true}
	return choice
}

// TestLateRequests has requests that no worker can serve in time, by the prediction or because their time
// is up in the queue.
func TestLateRequests(t *testing.T) {
	slow := &queue.Class{Name: "slow"}
	for _, v := range []struct {
		name    string
		late    queue.Late
		checked int
		tried   bool
		full    bool
		refused bool
		demoted bool
	}{
		{name: "Serve", late: queue.Serve, checked: 10},
		{name: "Unchecked", late: queue.Refuse, checked: 9},
		{name: "Refuse", late: queue.Refuse, checked: 10, refused: true},
		{name: "AfterAFailure", late: queue.Refuse, checked: 10, tried: true},
		{name: "Demote", late: queue.Demote, checked: 10, demoted: true},
		{name: "RefuseInTheQueue", late: queue.Refuse, full: true, refused: true},
		{name: "DemoteInTheQueue", late: queue.Demote, full: true, demoted: true},
	} {
		t.Run(v.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, workers, o := limited(t, 1, 1)
				want, began := anyWorker, time.Now()
				want.Class = &queue.Class{Name: "chat", Late: v.late, Demote: slow}
				want.Deadline, want.Tenant = began.Add(2*time.Second), 7
				for range v.checked {
					p.Promises.Compare("chat", 2*time.Second, time.Second, time.Second, began)
				}
				want.Again = v.tried
				var by Chooser = new(long)
				if v.full {
					by = new(chooser)
					for _, w := range workers {
						w.TakeSlot()
						time.AfterFunc(5*time.Second, func() { p.queue.free(w) })
					}
				}
				var s Seat
				_, err := p.Seat(t.Context(), &want, &o, by, &s)
				late, isLate := errors.AsType[*LateError](err)
				if isLate != v.refused || err != nil && !isLate || s.Demoted != v.demoted {
					t.Fatalf("error %v, demoted %v", err, s.Demoted)
				}
				waited := time.Since(began)
				switch {
				case v.refused && v.full:
					if waited != 2*time.Second || late.After() != 0 {
						t.Errorf("refused after %v, to come again after %v: %v", waited, late.After(), late)
					}
				case v.refused:
					if waited != 0 || late.After() < 10*time.Second || late.After() != late.Predicted-2*time.Second {
						t.Errorf("refused after %v, to come again after %v: %v", waited, late.After(), late)
					}
				case v.full && waited != 5*time.Second:
					t.Errorf("seated after %v", waited)
				case !v.full && s.Predicted.Sub(began) < 10*time.Second:
					t.Errorf("predicted in %v", s.Predicted.Sub(began))
				}
				s.Leave(false, nil)
				if n := p.Scheduler.Stats().Leases; n != 0 {
					t.Errorf("%d leases", n)
				}
			})
		})
	}
}
