package textmap

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
	"github.com/zeebo/xxh3"
)

const (
	textBlock  = 64 // bytes
	tokenBlock = 16
)

// borders is a tokenizer: a token ends where the bytes around say so. What follows a text may therefore
// change its last token.
func borders(text []byte) (ends []int) {
	for i := 1; i < len(text); i++ {
		if (uint(text[i-1])*31+uint(text[i])*17)%4 == 0 {
			ends = append(ends, i)
		}
	}
	return append(ends, len(text))
}

// prompt is a text and its tokens.
type prompt struct {
	bytes  []byte
	text   Text
	past   float64
	tokens []uint64 // hashes of full blocks
	count  int
	ends   []int // where token blocks end, in bytes
}

func promptOf(root uint64, text []byte) *prompt {
	p := &prompt{bytes: text, text: Text{Root: root, Weights: approx.Same(1000 * textBlock / 5), BlockTokens: tokenBlock}}
	for at := 0; at+textBlock <= len(text); at += textBlock {
		p.text.Blocks = append(p.text.Blocks, xxh3.Hash(text[at:at+textBlock]))
	}
	p.past = float64(len(text)%textBlock) / textBlock
	ends := borders(text)
	p.count = len(ends)
	for i := tokenBlock; i <= len(ends); i += tokenBlock {
		from := 0
		if i > tokenBlock {
			from = ends[i-tokenBlock-1]
		}
		h := xxh3.New()
		for _, end := range ends[i-tokenBlock : i] {
			_, _ = fmt.Fprintf(h, "%q", text[from:end])
			from = end
		}
		p.tokens = append(p.tokens, h.Sum64())
		p.ends = append(p.ends, from)
	}
	return p
}

func (p *prompt) learn(m *Map) { m.Learn(&p.text, p.past, p.tokens, int64(p.count)) }

func (m *Map) find(p *prompt) []uint64 {
	pieces, _, _ := m.Find(&p.text, nil)
	return slices.Concat(pieces...)
}

func letters(rnd *rand.Rand, n int) []byte {
	text := make([]byte, n)
	for i := range text {
		text[i] = byte(' ' + rnd.IntN(64))
	}
	return text
}

// check compares what the map counts with what it has.
func (m *Map) check(t *testing.T) {
	t.Helper()
	bytes, kids := int64(0), make(map[*run]int32)
	for i, r := range m.list {
		bytes += runBytes + int64(8*(cap(r.text)+cap(r.tokens)))
		if r.up != nil {
			kids[r.up]++
			if n := int(r.up.base) + len(r.up.tokens); int(r.base) > n {
				t.Fatalf("a run follows %d token blocks of %d", r.base, n)
			}
		}
		if int(r.place) != i || m.runs[r.begin()] != r {
			t.Fatal("a run is not in its place")
		}
	}
	for _, r := range m.list {
		if r.kids != kids[r] {
			t.Fatalf("a run counts %d below it, and has %d", r.kids, kids[r])
		}
	}
	if bytes != m.bytes || len(m.runs) != len(m.list) {
		t.Fatalf("%d bytes in %d runs are counted, and there are %d in %d", m.bytes, len(m.runs), bytes, len(m.list))
	}
}

// TestFoundBlocksAreTheTexts holds conversations that branch anywhere, also within a block and within a
// token. What the map finds of a text are the token blocks that it shares with texts before, but for a few at
// the end.
func TestFoundBlocksAreTheTexts(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	m := New(1 << 30)
	var past []*prompt
	found, known, wrong, worst := 0, 0, 0, 0
	for i := range 1000 {
		var text []byte
		if len(past) > 0 && rnd.IntN(10) > 0 {
			text = past[rnd.IntN(len(past))].bytes
			if rnd.IntN(2) > 0 {
				text = text[:rnd.IntN(len(text)+1)]
			}
		}
		p := promptOf(uint64(i%2), append(slices.Clip(text), letters(rnd, 50+rnd.IntN(1000))...))
		got := m.find(p)
		same := approx.Common(got, p.tokens)
		wrong += len(got) - same
		worst = max(worst, len(got)-same)
		found += same
		best := 0
		for _, q := range past {
			if q.text.Root == p.text.Root {
				best = max(best, approx.Common(q.tokens, p.tokens))
			}
		}
		known += best
		p.learn(m)
		if m.check(t); t.Failed() {
			return
		}
		if again := m.find(p); approx.Common(again, p.tokens) != len(again) || len(again) < len(p.tokens)-2 {
			t.Fatalf("prompt %d was learned with %d blocks, and has %d, of which %d are right", i, len(p.tokens), len(again), approx.Common(again, p.tokens))
		}
		past = append(past, p)
	}
	t.Logf("of %d blocks, %d are found; %d are not the text's, at most %d at once", known, found, wrong, worst)
	if (known-found+wrong)*50 > known || worst > 2 {
		t.Error("too few are right")
	}
}

// TestPartingTextsCountTheTextBefore has a text that is first dense with tokens, and then not. The first text that
// parts from it says how many tokens there are before, and others part there, too.
func TestPartingTextsCountTheTextBefore(t *testing.T) {
	rnd := rand.New(rand.NewPCG(4, 5))
	m := New(1 << 30)
	stem := make([]byte, 2000)
	for i := range stem {
		stem[i] = 'P' + byte(rnd.IntN(2))
	}
	base := promptOf(1, append(slices.Clip(stem), letters(rnd, 4000)...))
	base.learn(m)
	promptOf(1, append(slices.Clip(stem[:1800]), letters(rnd, 500)...)).learn(m)
	for at := 200; at < 1800; at += 200 {
		p := promptOf(1, append(slices.Clip(stem[:at]), letters(rnd, 500)...))
		if got, want := len(m.find(p)), approx.Common(base.tokens, p.tokens); got < want-2 || got > want+2 {
			t.Errorf("%d blocks are found where texts part after %d bytes, want %d", got, at, want)
		}
	}
}

// TestWrongLessonsAreReplaced has the map learn other tokens than a text has. The right ones take their
// place, and those of other texts stay.
func TestWrongLessonsAreReplaced(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	m := New(1 << 30)
	stem := letters(rnd, 3000)
	other := promptOf(1, append(slices.Clip(stem), letters(rnd, 1000)...))
	other.learn(m)
	for range 20 {
		p := promptOf(1, append(slices.Clip(stem), letters(rnd, 500+rnd.IntN(2000))...))
		foreign := promptOf(1, letters(rnd, len(p.bytes)))
		m.Learn(&p.text, p.past, foreign.tokens, int64(foreign.count))
		p.learn(m)
		m.check(t)
		next := promptOf(1, append(slices.Clip(p.bytes), letters(rnd, 300)...))
		for _, q := range []*prompt{p, next} {
			got := m.find(q)
			if right := approx.Common(got, q.tokens); right < len(got)-1 || q == p && right < len(got) { // what follows may change the last token
				t.Fatalf("%d blocks, of which %d are right", len(got), right)
			}
			q.learn(m)
		}
		if got := m.find(next); len(got) < len(next.tokens)-2 {
			t.Fatalf("%d of %d blocks are found", len(got), len(next.tokens))
		}
	}
	if got := m.find(other); len(got) < len(other.tokens)-2 || approx.Common(got, other.tokens) != len(got) {
		t.Errorf("%d of another text's %d blocks are found", len(got), len(other.tokens))
	}
	if m.Size().Contradictions == 0 {
		t.Error("no contradiction was counted")
	}
}

// TestAnswersWithoutATextBlock learns prompts, and then each with an answer that has more tokens but fills no
// block of text.
func TestAnswersWithoutATextBlock(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	m := New(1 << 30)
	stem := letters(rnd, 1000)
	for range 20 {
		p := promptOf(1, append(slices.Clip(stem), letters(rnd, 500+rnd.IntN(500))...))
		n := len(p.tokens) - 1 - rnd.IntN(2)
		m.Learn(&p.text, p.past, p.tokens[:n], int64(n*tokenBlock+5))
		p.learn(m)
		m.check(t)
		if memory := m.find(p); len(memory) < len(p.tokens)-2 || approx.Common(memory, p.tokens) != len(memory) {
			t.Errorf("%d of %d blocks are found, of which %d are right", len(memory), len(p.tokens), approx.Common(memory, p.tokens))
		}
	}
}

// TestMapStaysWithinItsMemory learns more than there is room for, and then gets less.
func TestMapStaysWithinItsMemory(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	const memory = 1 << 20
	m := New(memory)
	stem := letters(rnd, 4000)
	for range 2000 {
		promptOf(1, append(slices.Clip(stem), letters(rnd, 2000)...)).learn(m)
		if bytes := m.Size().Bytes; bytes > memory {
			t.Fatalf("%d bytes", bytes)
		}
	}
	m.check(t)
	if bytes := m.Size().Bytes; bytes < memory/2 {
		t.Errorf("only %d bytes are in use", bytes)
	}
	p := promptOf(1, stem)
	if got := m.find(p); len(got) < len(p.tokens)-2 {
		t.Errorf("%d of the %d blocks that all share are found", len(got), len(p.tokens))
	}
	for m.SetMemory(0); m.Step(100); {
		m.check(t)
	}
	if bytes := m.Size().Bytes; bytes != 0 || len(m.runs) != 0 {
		t.Errorf("%d bytes are left", bytes)
	}
}

func BenchmarkFind(b *testing.B) {
	rnd := rand.New(rand.NewPCG(7, 8))
	for _, every := range []int{8192, 64} { // blocks between branches
		b.Run(fmt.Sprint(every), func(b *testing.B) {
			m := New(1 << 30)
			text := letters(rnd, 8192*textBlock)
			p := promptOf(1, text)
			p.learn(m)
			for at := every; at < 8192; at += every {
				promptOf(1, append(slices.Clip(text[:at*textBlock]), letters(rnd, 640)...)).learn(m)
			}
			var pieces [][]uint64
			n := 0
			for b.Loop() {
				pieces, n, _ = m.Find(&p.text, pieces[:0])
			}
			if n < len(p.tokens)-2 {
				b.Fatal(n)
			}
		})
	}
}

func BenchmarkLearn(b *testing.B) {
	rnd := rand.New(rand.NewPCG(9, 10))
	m := New(1 << 30)
	stem := promptOf(1, letters(rnd, 128*textBlock))
	stem.learn(m)
	list := make([]*prompt, 1000)
	tokens := 0
	for i := range list {
		list[i] = promptOf(1, append(slices.Clip(stem.bytes), letters(rnd, 64*textBlock)...))
		tokens += list[i].count - stem.count
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		list[i%len(list)].learn(m)
	}
	b.ReportMetric(float64(m.Size().Bytes)/float64(tokens)*1e6, "B/Mtokens")
}
