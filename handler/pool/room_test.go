package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// simulated is an engine that computes prompts in steps, in their order.
type simulated struct {
	step     int64         // most prompt tokens of a step
	fixed    time.Duration // of a step
	token    time.Duration // of each prompt token in it
	slots    int           // most requests at a time; 0: any number
	parallel int           // engines behind the address; 0 is one
	answer   time.Duration // from the first token to the end

	*state
}

type state struct {
	mu      sync.Mutex
	waiting []*job
	running int
	came    chan struct{}
}

type job struct {
	left int64
	over chan struct{} // closed when its prompt is computed
}

// run runs one of the engines behind the address.
func (e *simulated) run(ctx context.Context) {
	for ctx.Err() == nil {
		e.mu.Lock()
		var batch []*job
		var tokens int64
		for _, j := range e.waiting {
			if tokens >= e.step {
				break
			}
			n := min(j.left, e.step-tokens)
			tokens += n
			j.left -= n
			batch = append(batch, j)
		}
		e.waiting = slices.DeleteFunc(e.waiting, func(j *job) bool { return slices.Contains(batch, j) })
		e.mu.Unlock()
		if len(batch) == 0 {
			select {
			case <-e.came:
				select {
				case <-time.After(time.Microsecond): // all that come now are there
				case <-ctx.Done():
				}
			case <-ctx.Done():
			}
			continue
		}
		time.Sleep(e.fixed + time.Duration(tokens)*e.token)
		e.mu.Lock()
		for _, j := range slices.Backward(batch) {
			if j.left > 0 {
				e.waiting = slices.Insert(e.waiting, 0, j)
			} else {
				close(j.over)
			}
		}
		e.mu.Unlock()
	}
}

// compute computes a prompt, and returns when it is over.
func (e *simulated) compute(tokens int64) {
	j := &job{left: tokens, over: make(chan struct{})}
	e.mu.Lock()
	for e.slots > 0 && e.running >= e.slots {
		e.mu.Unlock()
		time.Sleep(time.Millisecond)
		e.mu.Lock()
	}
	e.running++
	e.waiting = append(e.waiting, j)
	e.mu.Unlock()
	select {
	case e.came <- struct{}{}:
	default:
	}
	<-j.over
}

func (e *simulated) ended() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.running--
}

// priced chooses by predicted times.
type priced struct {
	chooser
	request kvscore.Request
}

func (c *priced) Choose(context.Context, *Candidates) Choice {
	return Choice{Request: &c.request, Policy: kvscore.NewPredictedLatency(), Bound: -1}
}

// load is a number of prompts that come at once, again and again.
type load struct {
	prompts int
	tokens  int64
	every   time.Duration
	times   int
	plain   bool  // no stream
	counts  int64 // tokens of a plain answer
	leaves  bool  // the client leaves after the first token
}

// room is a pool of simulated engines.
type room struct {
	*Pool
	offers  Offers
	engines map[string]*simulated
	number  uint64
	most    int // that waited at a time

	patience time.Duration // 0: 30 s
}

// roomOf starts engines, which run until the test ends. It must run in a synctest bubble.
func roomOf(t *testing.T, hold string, engines ...*simulated) *room {
	t.Helper()
	var set []worker.Settings
	var dials []string
	r := &room{engines: make(map[string]*simulated)}
	for i, e := range engines {
		dials = append(dials, fmt.Sprintf("%c:1", 'a'+i))
		set = append(set, worker.Settings{Dial: dials[i]})
		e.state = &state{came: make(chan struct{}, 1)}
		r.engines[dials[i]] = e
		for range max(1, e.parallel) {
			go e.run(t.Context())
		}
	}
	s := wanted(set...)
	s.Hold = hold
	r.Pool = testPool(t, s)
	r.offers = new(Tables).Offers(r.Pool, upstreamsOf(dials...), nil)
	return r
}

// ask sends one request. It returns the time to the end of its prefill.
func (r *room) ask(ctx context.Context, want Wants, l *load, number uint64) (time.Duration, error) {
	begun := time.Now()
	blocks := make([]uint64, l.tokens/16)
	for i := range blocks {
		blocks[i] = number<<32 + uint64(i)
	}
	by := &priced{request: kvscore.Request{Prompt: cache.Prompt{Root: 1, Blocks: blocks, BlockTokens: 16, Tokens: l.tokens}, Streamed: !l.plain}}
	want.Rank, want.Kind, want.Arrival, want.Prompt = AnyRank, worker.KindStream, begun, l.tokens
	want.Patience = cmp.Or(want.Patience, r.patience, 30*time.Second)
	if l.plain {
		want.Kind = worker.KindPlain
	}
	var s Seat
	o := r.offers
	r.varied.Store(begun.Add(-sharedFor).UnixNano()) // as with two tenants, of which only one sends requests now
	if _, err := r.Seat(ctx, &want, &o, by, &s); err != nil {
		return 0, err
	}
	defer s.Leave(true, nil)
	e := r.engines[s.Worker.Dial]
	defer e.ended()
	if e.compute(l.tokens - s.Terms.OverlapTokens); !l.plain {
		s.FirstToken(time.Now())
	}
	took := time.Since(begun)
	if l.leaves {
		return took, nil
	}
	time.Sleep(e.answer)
	if l.plain {
		s.Answered(time.Now(), l.counts)
	}
	return took, nil
}

// serve serves a load, and returns the mean time to the end of a prefill and the time to the end of all.
func (r *room) serve(t *testing.T, l *load) (mean, all time.Duration) {
	t.Helper()
	begun := time.Now()
	var sum time.Duration
	var mu sync.Mutex
	var clients sync.WaitGroup
	for range l.times {
		for range l.prompts {
			r.number++
			number := r.number
			clients.Go(func() {
				took, err := r.ask(t.Context(), Wants{}, l, number)
				mu.Lock()
				defer mu.Unlock()
				if sum += took; err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		r.most = max(r.most, r.Waiting())
		time.Sleep(l.every)
	}
	clients.Wait()
	return sum / time.Duration(l.prompts*l.times), time.Since(begun)
}

// TestHoldIsNotSlower has plain pools, whose engines may compute prompts in other ways than the router
// assumes. Prompts are alike, so no order is better than another.
func TestHoldIsNotSlower(t *testing.T) {
	const us, ms = time.Microsecond, time.Millisecond
	for name, v := range map[string]struct {
		engine simulated
		load   load
		within float64 // of the times without hold
	}{
		"a usual engine":          {simulated{step: 8192, fixed: 5 * ms, token: 50 * us, answer: 2 * time.Second}, load{100, 700, 3 * time.Second, 10, false, 0, false}, 1.02},
		"one prompt at a time":    {simulated{step: 1 << 30, fixed: 5 * ms, token: 50 * us, slots: 1}, load{20, 3000, 3 * time.Second, 10, false, 0, false}, 1.02},
		"batches 64 at once":      {simulated{step: 1 << 30, fixed: 50 * ms, token: 0, answer: time.Second}, load{64, 600, 3 * time.Second, 20, false, 0, false}, 1.02},
		"batches 64, no pause":    {simulated{step: 1 << 30, fixed: 50 * ms, token: 0, answer: 200 * ms}, load{64, 600, 300 * ms, 50, false, 0, false}, 1.02},
		"small steps":             {simulated{step: 2048, fixed: 5 * ms, token: 100 * us, answer: time.Second}, load{60, 1000, 9 * time.Second, 8, false, 0, false}, 1.02},
		"large steps":             {simulated{step: 32768, fixed: 40 * ms, token: 20 * us, answer: time.Second}, load{100, 1000, 3 * time.Second, 10, false, 0, false}, 1.03},
		"four slots":              {simulated{step: 2048, fixed: 5 * ms, token: 200 * us, slots: 4, answer: 500 * ms}, load{12, 3000, 12 * time.Second, 10, false, 0, false}, 1.02},
		"embeddings":              {simulated{step: 16384, fixed: 5 * ms, token: 10 * us}, load{100, 500, time.Second, 20, true, 0, false}, 1.02},
		"plain answers":           {simulated{step: 8192, fixed: 5 * ms, token: 50 * us, answer: 2 * time.Second}, load{100, 700, 4 * time.Second, 10, true, 100, false}, 1.02},
		"long prompts":            {simulated{step: 8192, fixed: 5 * ms, token: 50 * us, answer: time.Second}, load{10, 40_000, 25 * time.Second, 6, false, 0, false}, 1.02},
		"unsaturated":             {simulated{step: 8192, fixed: 5 * ms, token: 50 * us, answer: time.Second}, load{2, 4000, time.Second, 30, false, 0, false}, 1.02},
		"much slower than before": {simulated{step: 8192, fixed: 5 * ms, token: 500 * us, answer: time.Second}, load{10, 4000, 25 * time.Second, 6, false, 0, false}, 1.02},
	} {
		t.Run(name, func(t *testing.T) {
			var mean, all [2]time.Duration
			held := 0
			for i, hold := range []string{HoldOff, HoldAuto} {
				synctest.Test(t, func(t *testing.T) {
					e := v.engine
					r := roomOf(t, hold, &e)
					mean[i], all[i] = r.serve(t, &v.load)
					held = r.most
				})
			}
			t.Logf("mean %v -> %v, all %v -> %v, %d held", mean[0], mean[1], all[0], all[1], held)
			for _, took := range [][2]time.Duration{mean, all} {
				if float64(took[1]) > v.within*float64(took[0])+float64(2*ms) {
					t.Errorf("%v with hold, %v without", took[1], took[0])
				}
			}
		})
	}
}

// TestHoldFindsTheDepth has engines behind one address that compute eight prompts at once, which they do not
// report.
func TestHoldFindsTheDepth(t *testing.T) {
	var all [2]time.Duration
	for i, hold := range []string{HoldOff, HoldAuto} {
		synctest.Test(t, func(t *testing.T) {
			e := &simulated{step: 4096, fixed: 5 * time.Millisecond, token: 100 * time.Microsecond, parallel: 8, answer: time.Second}
			r := roomOf(t, hold, e)
			r.patience = time.Hour
			r.learn(t)
			_, all[i] = r.serve(t, &load{50, 4000, 3 * time.Second, 100, false, 0, false})
		})
	}
	if t.Logf("%v with hold, %v without", all[1], all[0]); all[1] > all[0]*11/10 {
		t.Error("the hold keeps engines idle")
	}
}

// TestHoldLetsGo has a worker whose prefill never ends.
func TestHoldLetsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := roomOf(t, HoldAuto, usual())
		r.learn(t)
		var stuck [2]Seat
		for i := range stuck {
			w := r.offers.workers()[0]
			r.SeatAt(w, w.Target(0), &kvscore.Request{Prompt: cache.Prompt{Tokens: 100_000}, Streamed: true}, &stuck[i])
		}
		r.patience = time.Hour
		took, err := r.ask(t.Context(), Wants{}, &load{tokens: 1000}, 1)
		if err != nil || took < holdSilence-5*time.Second || took > holdSilence+5*time.Second {
			t.Errorf("error %v after %v", err, took)
		}
		for i := range stuck {
			stuck[i].Leave(false, nil)
		}
	})
}

// TestHeldRequestsAreKept holds many requests. Some clients leave, the operator drains a worker, a
// configuration ends the hold, and the pool ends.
func TestHeldRequestsAreKept(t *testing.T) {
	for name, happens := range map[string]func(r *room, leave func()){
		"clients leave": func(_ *room, leave func()) { leave() },
		"drain":         func(r *room, _ func()) { r.Drain(r.offers.workers()[0], true) },
		"reload": func(r *room, _ func()) {
			set := *r.Settings.Load()
			set.Hold = HoldOff
			r.Apply(&set)
		},
		"the pool ends": func(r *room, _ func()) { r.endLife() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := roomOf(t, HoldAuto, usual(), usual())
				r.learn(t)
				own, leave := context.WithCancel(t.Context())
				defer leave()
				var served, left atomic.Int64
				var clients sync.WaitGroup
				for i := range 60 {
					clients.Go(func() {
						at := t.Context()
						if i%2 == 0 {
							at = own
						}
						switch _, err := r.ask(at, Wants{}, &load{tokens: 4000}, uint64(1e6+i)); {
						case err == nil:
							served.Add(1)
						case errors.Is(err, context.Canceled):
							left.Add(1)
						default:
							t.Error(err)
						}
					})
				}
				synctest.Wait()
				if held := r.Waiting(); held < 40 {
					t.Fatalf("%d wait", held)
				}
				if happens(r, leave); name == "reload" && r.Waiting() != 0 {
					t.Errorf("%d wait without hold", r.Waiting())
				}
				clients.Wait()
				if served.Load()+left.Load() != 60 || name != "clients leave" && left.Load() > 0 {
					t.Errorf("%d are served, %d left", served.Load(), left.Load())
				}
				for _, w := range r.offers.workers() {
					if room, _ := r.Scheduler.Room(time.Now(), w.Target(0)); room == kvscore.NoRoom || running(w) != 0 {
						t.Errorf("%s: %d run, and its room is %d", w.Dial, running(w), room)
					}
				}
				if r.Waiting() != 0 || r.Scheduler.Stats().Leases != 0 {
					t.Error("something is left")
				}
			})
		})
	}
}
