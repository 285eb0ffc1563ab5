package sim

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

const crowd, singles = 200, 40

// sharedKey makes a closed loop of two kinds of clients. A crowd has long requests, one after
// the other, with common tokens at the beginning and their own after that. If chats is set,
// these are the turns of conversations. Single clients always have conversations.
func sharedKey(common int, chats bool) *trace.Trace {
	const block = 16
	tr := &trace.Trace{BlockTokens: block, Sessions: true, Closed: true}
	rnd, last := rand.New(rand.NewPCG(1, 2)), uint64(1_000_000)
	system := blocks(common / block)
	grow := func(chain []uint64, tokens int) []uint64 {
		for range tokens / block {
			last++
			chain = append(chain, trace.Hash(last))
		}
		return chain
	}
	for client := range crowd {
		chain := grow(slices.Clone(system), 500+rnd.IntN(1500))
		for turn := range 10 {
			if !chats {
				chain = system
			}
			chain = grow(slices.Clone(chain), 500+rnd.IntN(2500))
			tr.Requests = append(tr.Requests, trace.Request{
				Session: client, Turn: turn, In: len(chain) * block, Out: 300 + rnd.IntN(400), Blocks: chain,
				At: time.Duration(rnd.IntN(1000)) * time.Millisecond,
			})
		}
	}
	for client := range singles {
		chain := grow(nil, 2000)
		for turn := range 20 {
			chain = grow(slices.Clone(chain), 100+rnd.IntN(400))
			tr.Requests = append(tr.Requests, trace.Request{
				Session: crowd + client, Turn: turn, In: len(chain) * block, Out: 20 + rnd.IntN(100), Blocks: chain,
				At: time.Duration(rnd.IntN(1000)) * time.Millisecond, Think: time.Duration(rnd.IntN(4000)) * time.Millisecond,
			})
		}
	}
	return tr
}

// TestSharedKeyMakesNoHotSpot has 200 clients that use one session key, and 40 clients with a
// key each. The former spread over the engines, whatever their prompts have in common. The
// latter stay at home.
func TestSharedKeyMakesNoHotSpot(t *testing.T) {
	for _, v := range []struct {
		common int
		chats  bool
		most   float64
	}{
		{0, false, 1.5},
		{1600, false, 1.5},
		// At the start, computing so long a prompt a third time is not worth it. That is
		// the same without sessions.
		{16_000, false, 4},
		{0, true, 1.5},
		{1600, true, 1.5},
	} {
		c := cell(sharedKey(v.common, v.chats), "predicted_latency")
		c.Workers, c.KVTokens, c.Sessions = 4, []int64{800_000}, true
		c.key = func(session int) int {
			if session < crowd {
				return 0
			}
			return session
		}
		r := run(t, c)
		mean, most, looks := r.inFlight()
		home, turns := r.atHome()
		if mean > 1.5 || most > v.most || looks < 100 || 20*home < 19*turns {
			t.Errorf("%+v: in flight, max/mean: mean %.2f, at most %.2f of %d looks; %d of %d turns at home, placed %v", v, mean, most, looks, home, turns, r.placed())
		}
	}
}

// inFlight returns the mean and the maximum of the highest number of the crowd's requests on
// an engine, divided by the average of the engines. Only times count at which most of the
// crowd waits for an answer.
func (r *replay) inFlight() (mean, most float64, looks int) {
	var end time.Duration
	for i := range r.requests {
		end = max(end, r.requests[i].ended)
	}
	for at := time.Duration(0); at < end; at += 100 * time.Millisecond {
		n, all := make([]int, len(r.engines)), 0
		for i := range r.requests {
			if q := &r.requests[i]; r.Trace.Requests[i].Session < crowd && q.arrived <= at && at < q.ended {
				n[q.at]++
				all++
			}
		}
		if all < crowd*3/4 {
			continue
		}
		ratio := float64(slices.Max(n)*len(n)) / float64(all)
		if ratio > 1.5 {
		}
		mean, most, looks = mean+ratio, max(most, ratio), looks+1
	}
	return mean / float64(max(looks, 1)), most, looks
}

// atHome returns the turns of single clients after their first, and how many of them went
// where the turn before was.
func (r *replay) atHome() (home, turns int) {
	for i := range r.requests {
		if q := &r.Trace.Requests[i]; q.Session >= crowd && q.Turn > 0 {
			turns++
			if r.requests[i].at == r.requests[i-1].at {
				home++
			}
		}
	}
	return home, turns
}
