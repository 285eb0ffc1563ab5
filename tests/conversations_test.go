package tests

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// conversation is one chat that grows by a question and its answer each turn.
type conversation struct {
	chat    chat
	engines []string // who answered each turn
	rng     *rand.Rand
}

// prose returns n to m bytes of words.
func prose(rng *rand.Rand, n, m int) string {
	size := n + rng.IntN(m-n+1)
	var b strings.Builder
	for b.Len() < size {
		fmt.Fprintf(&b, "%x ", rng.Uint64N(1<<(4*(1+rng.Uint64N(9)))))
	}
	return b.String()[:size]
}

// newConversations returns n conversations. The seed determines their text.
func newConversations(n int, seed uint64, history ...message) []*conversation {
	out := make([]*conversation, n)
	for i := range out {
		out[i] = &conversation{
			chat: chat{Model: "canned", Messages: append([]message(nil), history...)},
			rng:  rand.New(rand.NewPCG(seed, uint64(i))),
		}
	}
	return out
}

// converse takes all conversations through their turns in a dialect, with 8 clients at once. Each
// client takes the conversation that has waited longest and makes one turn.
func (s *server) converse(t *testing.T, convs []*conversation, turns int, stream bool, d dialect) {
	t.Helper()
	queue := make(chan *conversation, len(convs))
	for _, c := range convs {
		queue <- c
	}
	var open sync.WaitGroup
	open.Add(len(convs))
	go func() {
		open.Wait()
		close(queue)
	}()
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for c := range queue {
				c.chat.Messages = append(c.chat.Messages, message{"user", prose(c.rng, 100, 600)})
				a := s.post(t.Context(), d.path, mustJSON(d.body(c.chat.Messages, stream)))
				text, whole := d.said(a, stream)
				if !whole || d.plain != "" && text == "" {
					t.Errorf("%s, turn %d: status %d, error %v, answer %.300q", d.name, len(c.engines)+1, a.status, a.err, a.body)
					open.Done()
					continue
				}
				c.engines = append(c.engines, a.engine())
				if d.plain != "" {
					c.chat.Messages = append(c.chat.Messages, message{"assistant", text})
				}
				if len(c.engines) == turns {
					open.Done()
				} else {
					queue <- c
				}
			}
		})
	}
	clients.Wait()
}

// kept returns the share of turns, from the given one on (the second is 1), that reached
// the engine of the turn before.
func kept(convs []*conversation, from int) float64 {
	same, all := 0, 0
	for _, c := range convs {
		for i := from; i < len(c.engines); i++ {
			all++
			if c.engines[i] == c.engines[i-1] {
				same++
			}
		}
	}
	return float64(same) / float64(max(all, 1))
}

// moves returns how many conversations moved at their second turn, their third and so on.
func moves(convs []*conversation) []int {
	var out []int
	for _, c := range convs {
		for i := 1; i < len(c.engines); i++ {
			if i > len(out) {
				out = append(out, 0)
			}
			if c.engines[i] != c.engines[i-1] {
				out[i-1]++
			}
		}
	}
	return out
}

// spread returns how many requests each engine had, and the highest count as a multiple of
// the mean.
func spread(engines []*canned.Engine) ([]int, float64) {
	counts, total, most := make([]int, len(engines)), 0, 0
	for i, e := range engines {
		counts[i] = e.Requests()
		total += counts[i]
		most = max(most, counts[i])
	}
	return counts, float64(most) * float64(len(engines)) / float64(max(total, 1))
}

// startTimed starts simulated engines, e1 and so on. They take a quarter of the real time
// for what they compute.
func startTimed(t testing.TB, n, ranks int) []*engine.Engine {
	t.Helper()
	engines := make([]*engine.Engine, n)
	for i := range engines {
		cfg := engine.Config{Name: fmt.Sprint("e", i+1), Model: "canned", AnswerTokens: 24, Speed: 4, Ranks: ranks}
		var err error
		if engines[i], err = engine.Start(cfg); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(engines[i].Close)
	}
	return engines
}

// worked is the work of simulated engines.
type worked struct {
	requests []int // by engine
	top      float64
	computed int // prompt tokens
}

func work(engines []*engine.Engine) (w worked) {
	total := 0
	for _, e := range engines {
		n := 0
		for _, r := range e.Journal() {
			if r.PromptTokens > 0 {
				n++
				w.computed += r.PromptTokens - max(0, r.CachedTokens)
			}
		}
		w.requests, total = append(w.requests, n), total+n
	}
	w.top = float64(slices.Max(w.requests)) * float64(len(engines)) / float64(max(total, 1))
	return w
}

// tokens is the approximate length of messages in the simulated engines' tokens.
func tokens(messages []message) (n int) {
	for _, m := range messages {
		n += len(m.Content) / 4
	}
	return n
}

// littleIsComputedTwice holds at most three rounds of conversations. In one round, the
// engines must compute little more than each text once. With round_robin, they computed 3.1 to 3.3 times
// as much (own documents) and 2.2 to 2.3 times (a shared one) in six rounds. In that round no engine may have more than evenly times the mean of requests. If the machine stalls an
// engine for the time of some dozens of answers, the engine looks busy, and the router rightly avoids it.
func littleIsComputedTwice(t *testing.T, evenly float64, hold func(t *testing.T) (least int, w worked)) {
	t.Helper()
	const rounds, most = 3, 1.7
	for round := 1; ; round++ {
		least, w := hold(t)
		share := float64(w.computed) / float64(least)
		t.Logf("round %d: %d tokens were computed, %.2f of the least; requests %v", round, w.computed, share, w.requests)
		if share <= most && w.top <= evenly {
			return
		}
		if round == rounds {
			t.Fatalf("want at most %v of the least tokens, and at most %v of the mean requests", most, evenly)
		}
	}
}

// anyShare allows one engine to have all requests. With few requests, one cache with a
// long beginning can be worth more than idle engines.
const anyShare = 4

// TestConversationsReturnToTheirEngine holds 50 interleaved conversations of 6 turns. The
// kv_router has upstreams and no other options. Each conversation has its own document, or
// all share one.
func TestConversationsReturnToTheirEngine(t *testing.T) {
	shared := message{"system", prose(rand.New(rand.NewPCG(8, 8)), 8192, 8192)}
	for _, own := range []bool{true, false} {
		t.Run(fmt.Sprintf("OwnDocuments=%v", own), func(t *testing.T) {
			evenly := 1.6
			if !own {
				evenly = anyShare
			}
			littleIsComputedTwice(t, evenly, func(t *testing.T) (least int, w worked) {
				engines := startTimed(t, 4, 1)
				s := startCaddy(t, simulated(engines))
				convs := newConversations(50, 1)
				common := []message{shared}
				if own {
					common = nil
				}
				for _, c := range convs {
					document := shared
					if own {
						document = message{"system", prose(c.rng, 4096, 8192)}
					}
					c.chat.Messages = []message{document}
				}
				s.converse(t, convs, 6, own, dialects[0]) // streams, and plain answers
				s.booksAtZero(t)
				return leastWork(convs, common, len(engines)), work(engines)
			})
		})
	}
}

// leastWork is the least number of tokens to compute: the common part once for each
// engine, and the rest once.
func leastWork(convs []*conversation, common []message, engines int) int {
	n := tokens(common) * engines
	for _, c := range convs {
		n += tokens(c.chat.Messages) - tokens(common)
	}
	return n
}
