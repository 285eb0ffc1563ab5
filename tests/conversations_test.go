package tests

import (
	"fmt"
	"math/rand/v2"
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
func newConversations(n int, seed uint64) []*conversation {
	out := make([]*conversation, n)
	for i := range out {
		out[i] = &conversation{chat: chat{Model: "canned"}, rng: rand.New(rand.NewPCG(seed, uint64(i)))}
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

// tokens is the approximate length of messages in the simulated engines' tokens.
func tokens(messages []message) (n int) {
	for _, m := range messages {
		n += len(m.Content) / 4
	}
	return n
}
