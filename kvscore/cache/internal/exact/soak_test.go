package exact

import (
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"time"
)

// TestSoak churns an index of 1,000,000 blocks, and expects that its memory stays the same.
// It runs with KVROUTER_LONG=1, for KVROUTER_SOAK (a duration, 10s if unset).
//
// Eight engines hold as much as fits: conversations that share system prompts, and grow turn
// by turn. An engine drops the conversation that waited longest, from its end. Sometimes one
// restarts.
func TestSoak(t *testing.T) {
	if os.Getenv("KVROUTER_LONG") == "" {
		t.Skip("set KVROUTER_LONG=1")
	}
	length := 10 * time.Second
	if s := os.Getenv("KVROUTER_SOAK"); s != "" {
		var err error
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatal(err)
		}
	}
	before := heap()
	x := New(1 << 30)
	engines := make([]*churner, 8)
	for i := range engines {
		engines[i] = &churner{x: x, target: i, room: 125_000, rnd: rand.New(rand.NewPCG(1, uint64(i)))}
	}
	var peak, peakHeap int64
	events, matches := 0, 0
	var m Match
	start, report := time.Now(), time.Now()
	for time.Since(start) < length {
		for _, e := range engines {
			for range 100 {
				e.turn()
				events++
			}
			if e.rnd.IntN(20_000) == 0 {
				e.restart()
			}
			x.Match(1, e.last, &m)
			matches++
		}
		x.Step(500)
		if time.Since(report) < length/20 {
			continue
		}
		report = time.Now()
		real := heap() - before
		t.Logf("%6.1f s: %9d turns, %8d blocks, counted %6.1f MB, heap %6.1f MB", time.Since(start).Seconds(), events,
			x.Distinct(), float64(x.Bytes())/1e6, float64(real)/1e6)
		if time.Since(start) < length/2 {
			peak, peakHeap = max(peak, x.Bytes()), max(peakHeap, real)
		} else if x.Bytes() > peak*105/100 || real > peakHeap*105/100 {
			t.Errorf("grew from %d to %d bytes, heap from %d to %d", peak, x.Bytes(), peakHeap, real)
		}
	}
	for _, e := range engines {
		if x.Incomplete(e.target) {
			t.Errorf("target %d is incomplete", e.target)
		}
	}
	x.check(t)
	for _, e := range engines {
		e.restart()
	}
	for x.Step(1000) {
	}
	if x.Distinct() > 0 || x.Bytes() > 40_000 {
		t.Errorf("%d blocks and %d bytes are left", x.Distinct(), x.Bytes())
	}
	runtime.KeepAlive(engines)
}

// churner is an engine. It keeps how many blocks each conversation has, and makes the
// hashes again when it needs them.
type churner struct {
	x      *Index
	target int
	room   int // blocks
	used   int
	rnd    *rand.Rand
	kept   []conversation // the one that waited longest first
	stems  [8]int         // conversations that use a system prompt
	next   uint64
	last   []uint64
}

type conversation struct {
	seed   uint64
	blocks int // without the system prompt
}

const stemLong = 40

func (c conversation) chain() []uint64 {
	return append(chainOf(c.seed%8, stemLong), chainOf(c.seed+1000, c.blocks)...)
}

// turn goes on with a conversation, or begins one, and makes room for it.
func (e *churner) turn() {
	var c conversation
	if n := len(e.kept); n > 200 && e.rnd.IntN(4) > 0 {
		i := n - 1 - e.rnd.IntN(200)
		c = e.kept[i]
		e.kept = append(e.kept[:i], e.kept[i+1:]...)
	} else {
		e.next++
		c = conversation{seed: e.next<<8 | uint64(e.target)<<3 | e.rnd.Uint64N(8)}
		if e.stems[c.seed%8]++; e.stems[c.seed%8] == 1 {
			stem := chainOf(c.seed%8, stemLong)
			feed(e.x, e.target, stem, namesOf(1, stem), 64)
		}
	}
	more := 1 + e.rnd.IntN(40)
	for e.used+more > e.room {
		e.drop()
	}
	old := stemLong + c.blocks
	c.blocks += more
	e.used += more
	e.kept = append(e.kept, c)
	e.last = c.chain()
	names := namesOf(1, e.last)
	s := Stored{Target: e.target, HasParent: true}
	for i := old; i < len(names); {
		n := min(1+e.rnd.IntN(64), len(names)-i)
		s.Parent, s.Names, s.Blocks = names[i-1], names[i:i+n], e.last[i:i+n]
		if _, o := e.x.Store(&s); o != OK {
			panic("outcome")
		}
		i += n
	}
}

func (e *churner) drop() {
	c := e.kept[0]
	e.kept = e.kept[1:]
	e.used -= c.blocks
	names := namesOf(1, c.chain())
	unfeed(e.x, e.target, names[stemLong:], 1)
	if e.stems[c.seed%8]--; e.stems[c.seed%8] == 0 {
		unfeed(e.x, e.target, names[:stemLong], 1)
	}
}

func (e *churner) restart() {
	e.x.Clear(e.target)
	e.kept, e.used, e.stems = nil, 0, [8]int{}
}
