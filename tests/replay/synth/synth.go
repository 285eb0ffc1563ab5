// Package synth generates traces of hard cases for replay. The same name and seed
// give the same trace. The numbers are choices, not measurements: each case shows
// one thing that a routing policy can get wrong. Requests come at a rate that
// eight workers with 200,000 KV tokens each can serve.
//
// An answer's own blocks are not reused by the next turn, as in the other traces.
package synth

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// block is the number of tokens in a block of all generated traces.
const block = 64

// longest bounds a prompt in tokens, so that it fits into the poorest engine.
const longest = 110_000

// cases are all traces by name. A closed one follows each end with the next turn.
var cases = []struct {
	name   string
	closed bool
	make   func(*maker)
}{
	{"no_reuse", false, noReuse},
	{"lognormal", false, lognormal},
	{"lognormal_bursts", false, lognormalBursts},
	{"system_fits", false, systemFits},
	{"system_thrashes", false, systemThrashes},
	{"chat", true, chat},
	{"agents", true, agents},
	{"same_prompt_sequence", true, samePromptSequence},
	{"same_prompt_at_once", false, samePromptAtOnce},
	{"giants", false, giants},
	{"siblings", false, siblings},
	{"regenerate", true, regenerate},
	{"idle", false, idle},
	{"documents", false, documents},
	{"rush", false, rush},
}

// Names returns the names of all traces.
func Names() []string {
	names := make([]string, len(cases))
	for i := range cases {
		names[i] = cases[i].name
	}
	return names
}

// Make generates a trace.
func Make(name string, seed uint64) (*trace.Trace, error) {
	for _, c := range cases {
		if c.name != name {
			continue
		}
		h := fnv.New64a()
		h.Write([]byte(name))
		m := &maker{Rand: rand.New(rand.NewPCG(seed, h.Sum64()))} //nolint:gosec // to be repeated
		m.trace = &trace.Trace{Name: "synth:" + name, BlockTokens: block, Closed: c.closed, Sessions: true}
		c.make(m)
		m.trace.Sort()
		return m.trace, nil
	}
	return nil, fmt.Errorf("there is no synthetic trace %q, only %s", name, strings.Join(Names(), ", "))
}

// maker generates a trace.
type maker struct {
	*rand.Rand
	trace    *trace.Trace
	ids      uint64 // of blocks
	sessions int
	group    int // the most conversations that begin at one time; 0: each by itself
}

// prompt is a text: its full blocks, and its length.
type prompt struct {
	blocks []uint64
	tokens int
}

// more returns the prompt with so many new tokens behind it.
func (m *maker) more(p prompt, tokens int) prompt {
	p.tokens = min(p.tokens+max(1, tokens), longest)
	p.blocks = slices.Clip(p.blocks) // others may go on from the same prompt
	for len(p.blocks) < p.tokens/block {
		m.ids++
		p.blocks = append(p.blocks, trace.Hash(m.ids))
	}
	return p
}

// fresh returns a prompt of the given number of tokens that shares nothing.
func (m *maker) fresh(tokens int) prompt { return m.more(prompt{}, tokens) }

// fleet returns so many fresh prompts of about so many tokens.
func (m *maker) fleet(n int, tokens, sigma float64) []prompt {
	all := make([]prompt, n)
	for i := range all {
		all[i] = m.fresh(m.tokens(tokens, sigma))
	}
	return all
}

// session returns the number of a new session.
func (m *maker) session() int {
	m.sessions++
	return m.sessions - 1
}

// ask adds a request. Think counts in a closed loop only.
func (m *maker) ask(at float64, session, turn int, p prompt, answer int, think float64) {
	m.trace.Requests = append(m.trace.Requests, trace.Request{
		At: seconds(at), Think: seconds(think), In: p.tokens, Out: max(1, answer),
		Session: session, Turn: turn, Blocks: p.blocks,
	})
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// lognormal returns a value with this mean; sigma is that of its logarithm.
func (m *maker) lognormal(mean, sigma float64) float64 {
	return mean * math.Exp(sigma*m.NormFloat64()-sigma*sigma/2)
}

// tokens returns a lognormal number of at least 1.
func (m *maker) tokens(mean, sigma float64) int { return max(1, int(m.lognormal(mean, sigma))) }

// gap returns the time to the next arrival at a mean rate by second.
func (m *maker) gap(rate float64) float64 { return m.ExpFloat64() / rate }

// zipf returns a number below n: number i comes as often as (i+1)^-power.
func (m *maker) zipf(n int, power float64) func() int {
	sums := make([]float64, n)
	sum := 0.0
	for i := range sums {
		sum += math.Pow(float64(i+1), -power)
		sums[i] = sum
	}
	return func() int {
		i, _ := slices.BinarySearch(sums, m.Float64()*sum)
		return min(i, n-1)
	}
}
