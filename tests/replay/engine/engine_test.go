package engine

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestEvictsTailsOfTheOldest(t *testing.T) {
	c := NewCache(6)
	for _, chain := range [][]uint64{{1, 2, 3}, {11, 12, 13}} {
		if held, ok := c.Reserve(chain, 3); held != 0 || !ok {
			t.Fatalf("held %d, %v", held, ok)
		}
		c.Release(chain, nil, 3)
	}
	c.Reserve([]uint64{21, 22}, 2)
	if a, b := c.Held([]uint64{1, 2, 3}), c.Held([]uint64{11, 12, 13}); a != 1 || b != 3 {
		t.Errorf("%d and %d blocks are left, want the head of the first and all of the second", a, b)
	}
	if _, ok := c.Reserve([]uint64{11, 12, 13}, 5); ok {
		t.Error("five blocks were reserved where two of six are in use")
	}
	if got := c.Usage(); got != 2.0/6 {
		t.Errorf("usage is %v", got)
	}
}

func unique(i int) uint64 { return 1<<40 + uint64(i) }

func TestStepTimes(t *testing.T) {
	e := New(Default(), NewCache(1000), nil, 16)
	e.SetSlow(2)
	chain := make([]uint64, 500)
	for i := range chain {
		chain[i] = uint64(i) + 1
	}
	e.Add(&Job{Chain: chain, In: 8000, Out: 2, Answer: unique})
	want := []float64{
		8 + 0.04*4096 + 1.5e-6*4096*2048,
		8 + 0.04*3904 + 1.5e-6*3904*(4096+1952),
		8 + 0.04 + 5e-5*8001,
	}
	for i, ms := range want {
		took, ok := e.Begin()
		if got := float64(took) / float64(time.Millisecond) / 2; !ok || math.Abs(got-ms) > 1e-3 {
			t.Errorf("step %d took %v ms, want %v", i, got, ms)
		}
		first, over := e.End()
		if (len(first) == 1) != (i == 1) || (len(over) == 1) != (i == 2) {
			t.Errorf("step %d: %d first tokens, %d jobs over", i, len(first), len(over))
		}
	}
	if e.context != 0 {
		t.Errorf("%d tokens of context are left", e.context)
	}
	if got, want := Default().PrefillMS(0, 8000), want[0]+want[1]; math.Abs(got-want) > 1e-6 {
		t.Errorf("PrefillMS is %v, want %v", got, want)
	}
	if m, err := Find("mocker"); err != nil || m.StepMS(9, 0, 0, 0, 3) != m.StepMS(9, 0, 0, 0, 1) {
		t.Error("a step of jobs that share most blocks takes another time than with full memory", err)
	}
}

func TestTheLastPromptBlockIsComputed(t *testing.T) {
	e := New(Default(), NewCache(100), nil, 16)
	chain := []uint64{1, 2, 3}
	for _, c := range []struct{ in, cached int }{{48, 0}, {48, 32}, {50, 48}} {
		j := &Job{Chain: chain, In: c.in, Out: 1, Answer: unique}
		e.Add(j)
		e.Begin()
		if _, over := e.End(); len(over) != 1 || j.Cached != c.cached {
			t.Errorf("%d prompt tokens: %d cached, want %d", c.in, j.Cached, c.cached)
		}
	}
}

// TestPreempts admits two jobs whose answers do not both fit.
func TestPreempts(t *testing.T) {
	e := New(Default(), NewCache(10), nil, 16)
	e.Preempt()
	e.Add(&Job{Number: 1, Chain: []uint64{1, 2, 3}, In: 60, Out: 40, Answer: unique})
	e.Add(&Job{Number: 2, Chain: []uint64{11, 12, 13}, In: 60, Out: 40, Answer: unique})
	var firsts, overs []int
	for range 200 {
		if _, ok := e.Begin(); !ok {
			break
		}
		first, over := e.End()
		for _, j := range first {
			firsts = append(firsts, j.Number)
		}
		for _, j := range over {
			overs = append(overs, j.Number)
		}
	}
	if !slices.Equal(firsts, []int{1, 2}) || !slices.Equal(overs, []int{1, 2}) {
		t.Errorf("first tokens of %v, ends of %v, want each once", firsts, overs)
	}
	if e.steps <= 40 || e.steps > 80 {
		t.Errorf("%d steps, want more than of an answer, for the second waited", e.steps)
	}
	if e.context != 0 || e.cache.Usage() != 0 {
		t.Errorf("%d tokens of context and %v of the memory are left", e.context, e.cache.Usage())
	}
}

// TestMocker compares with times that Dynamo's simulator gave for single requests.
func TestMocker(t *testing.T) {
	m, err := Find("mocker")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		held, n int
		ms      float64
	}{{0, 512, 24.385704}, {0, 16_384, 338.273836}, {16_384, 4096, 85.755980}} {
		if got := m.PrefillMS(c.held, c.n); math.Abs(got-c.ms) > 1e-3 {
			t.Errorf("%d tokens behind %d take %v ms, want %v", c.n, c.held, got, c.ms)
		}
	}
	// 400 tokens behind a prompt of 102,400, in a memory of 499,968.
	e := New(m, NewCache(7812), nil, 64)
	e.Add(&Job{In: 102_400, Out: 400, Answer: unique})
	decoding := 0.0
	for {
		took, ok := e.Begin()
		if !ok {
			break
		}
		if len(e.decoding) > 0 {
			decoding += float64(took) / float64(time.Millisecond)
		}
		e.End()
	}
	if want := 8395.493821 - 2115.398996; math.Abs(decoding-want) > 0.001*want {
		t.Errorf("the answer takes %v ms, want %v", decoding, want)
	}
}
