package kvscore

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// text returns a prompt of the given number of text blocks, each of which is
// expected to have 16 tokens.
func text(blocks int, past float32) *Request {
	w := new([cache.Kinds]int32)
	for k := range w {
		w[k] = 16_000
	}
	r := &Request{Prompt: cache.Prompt{BlockTokens: 16, Past: past, Weights: cache.Weights{Kinds: w}}}
	for i := range blocks {
		r.Blocks = append(r.Blocks, uint64(i+1)<<5)
	}
	r.Tokens = int64((float32(blocks) + past) * 16)
	return r
}

func TestPromptsHaveTheEnginesCounts(t *testing.T) {
	now := time.Now()
	s := NewScheduler(Settings{})
	targets := []Target{{Worker: 1}, {Worker: 2}}
	for _, target := range targets {
		s.Declare(target, 0)
		s.SetPage(target, 32)
	}
	sel := Selection{Rand: seeded(1)}
	send := func(r *Request, c Counts, answer []uint64) {
		t.Helper()
		_, l := s.selectOf(now, r, targets, 0, nil, &sel)
		l.Counted(c)
		l.End(true, answer)
	}
	look := func(r *Request, tokens, cached int64) {
		t.Helper()
		s.explainOf(now, r, targets, 0, &LeastLoad{}, &sel)
		if sel.Tokens != tokens || sel.Candidates[0].OverlapTokens != cached || sel.Candidates[1].OverlapTokens != 0 {
			t.Errorf("%d tokens, %d cached, want %d, %d", sel.Tokens, sel.Candidates[0].OverlapTokens, tokens, cached)
		}
	}
	long := text(200, 0)
	send(text(100, 0.5), Counts{Prompt: 3216, Answer: 3300, AnswerPast: 0.25}, long.Blocks[:104])

	look(text(100, 0.5), 3216, 3200)  // floor((n-1)/32)*32
	look(text(100, 0.25), 3207, 3200) // less of the last block
	// What follows has as many tokens as the conversation had, nearly twice what is
	// expected of its kind of text.
	const whole = 3300 + 2831
	look(text(200, 0), whole, 3296)
	look(text(102, 0.5), 3258, 3232) // between the prompt's end and the answer's

	skips := text(200, 0)
	skips.SkipsCache = true
	look(skips, whole, 0)

	images := text(200, 0)
	images.MediaTokens = 1000
	images.Tokens += 1000
	look(images, 5335, 3296) // what is known beyond its text may be images

	_, l := s.selectOf(now, text(200, 0), targets, 0, nil, &sel)
	if load, _ := s.Load(now, targets[0]); load.PrefillTokens != sel.Tokens-3296 {
		t.Errorf("%d tokens are booked of %d", load.PrefillTokens, sel.Tokens)
	}
	l.End(false, nil)
}

// Engines whose block size is unknown are taken to have the pool's.
func TestCachedTokensAreRounded(t *testing.T) {
	now, target := time.Now(), Target{Worker: 1}
	ids := &Request{Prompt: cache.Prompt{BlockTokens: 16, Tokens: 330, Past: 10. / 16}}
	for i := range uint64(20) {
		ids.Blocks = append(ids.Blocks, i+1)
	}
	for _, c := range []struct{ page, whole, exact int64 }{
		{0, 320, 304}, {16, 320, 304}, {1, 320, 319}, {64, 320, 256}, {1000, 0, 0}, {-5, 320, 304},
	} {
		s := NewScheduler(Settings{})
		s.Declare(target, 0)
		s.SetPage(target, c.page)
		sel := Selection{Rand: seeded(1)}
		_, l := s.selectOf(now, ids, []Target{target}, 0, nil, &sel)
		l.End(true, nil)
		s.explainOf(now, ids, []Target{target}, 0, &LeastLoad{}, &sel)
		if got := sel.Candidates[0].OverlapTokens; got != c.whole {
			t.Errorf("blocks of %d: %d cached, want %d", c.page, got, c.whole)
		}
		full := *ids
		full.Tokens, full.Past = 320, 0
		s.explainOf(now, &full, []Target{target}, 0, &LeastLoad{}, &sel)
		if got := sel.Candidates[0].OverlapTokens; got != c.exact {
			t.Errorf("blocks of %d, full prompt: %d cached, want %d", c.page, got, c.exact)
		}
	}
}

// Counts that cannot be those of a text are ignored, in whatever steps they come.
func TestWrongCountsDoNotStick(t *testing.T) {
	now, ts := time.Now(), targets(1)
	s := NewScheduler(Settings{})
	s.Declare(ts[0], 0)
	sel := Selection{Rand: seeded(1)}
	for _, count := range []int64{1600, 220, 30, 5, 0, -7, 1 << 40, 12_000, 1600, 1600} {
		_, l := s.selectOf(now, text(100, 0), ts, 0, nil, &sel)
		l.Counted(Counts{Prompt: count, Answer: count + 1_000_000_000})
		l.End(true, text(101, 0).Blocks)
	}
	s.explainOf(now, text(120, 0), ts, 0, &LeastLoad{}, &sel)
	if n := sel.Known.Tokens; n < 1600 || n > 1632 {
		t.Errorf("%v tokens are known of 1616", n)
	}
}
