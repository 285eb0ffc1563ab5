// Package engine models an LLM engine in virtual time, for replay: continuous
// batching with chunked prefill, and a prefix cache. It does not route and does not
// know the time.
package engine

import (
	"container/heap"
	"slices"
	"time"
)

// Job is a request on an engine.
type Job struct {
	// Number is the caller's.
	Number int
	// Chain are the hashes of the prompt's full blocks.
	Chain []uint64
	// Answer returns the hash of block i of prompt and answer together.
	Answer func(i int) uint64
	// In and Out are the tokens of prompt and answer, at least 1 each.
	In, Out int
	// Cached is the number of prompt tokens that the engine did not compute. It
	// is set when the prefill begins.
	Cached int
	// Loaded says that the KV of the prompt has come from another engine. Such a job comes before
	// those that wait for their prefill.
	Loaded bool
	// Kept says that another engine is to get the KV: the job's blocks stay in use until Drop.
	Kept bool

	computed int // tokens that are computed or in the step
	last     int // the step that makes the last token
	made     int // tokens of the answer before the engine last took its room away
	held     int // blocks that it has
	turn     int // the number of its admission
}

// tokens returns how many tokens are computed before the next one is made.
func (j *Job) tokens() int { return j.In + j.made }

// Blocks returns how many blocks of the given number of tokens the job needs.
func (j *Job) Blocks(tokens int) int { return (j.In + j.Out + tokens - 1) / tokens }

// Chained returns the hashes of all full blocks of prompt and answer, appended to
// buf. The last token of an answer is never computed.
func (j *Job) Chained(buf []uint64, tokens int) []uint64 {
	buf = append(buf, j.Chain...)
	for i := len(j.Chain); i < (j.In+j.Out-1)/tokens; i++ {
		buf = append(buf, j.Answer(i))
	}
	return buf
}

// Engine is one engine. Begin and End take turns.
type Engine struct {
	model *Model
	cache *Cache
	line  *Line   // for the cache, nil if it is the engine's alone
	block int     // tokens
	slow  float64 // what the time of a step is multiplied with

	preempts bool
	turns    int // admissions
	growing  []*Job

	queue    []*Job // not admitted, the first at head
	head     int
	prefill  *Job // admitted, its prompt not yet computed
	decoding jobs
	steps    int
	context  int // tokens of all decoding requests

	finishing []*Job // their prefill ends with the step
	over      []*Job
	chain     []uint64
	refused   int // the cache's changes when it had no room, -1 if it had
}

// New returns an idle engine with blocks of the given number of tokens. Engines
// that have one cache need a line for it; else it is nil.
func New(m *Model, cache *Cache, line *Line, block int) *Engine {
	return &Engine{model: m, cache: cache, line: line, block: block, slow: 1, refused: -1}
}

// Clone returns a copy of the engine, with its own cache, which no other engine and no listener
// has. The jobs of the copy are those that job returns.
func (e *Engine) Clone(job func(*Job) *Job) *Engine {
	c := *e
	c.cache = e.cache.clone()
	each := func(list []*Job) []*Job {
		list = slices.Clone(list)
		for i := range list {
			list[i] = job(list[i])
		}
		return list
	}
	c.queue, c.head = each(e.queue[e.head:]), 0
	c.decoding, c.finishing = each(e.decoding), each(e.finishing)
	c.growing, c.over, c.chain = nil, nil, nil
	if c.prefill != nil {
		c.prefill = job(c.prefill)
	}
	return &c
}

// SetSlow sets what the time of each step is multiplied with, from the next one on.
func (e *Engine) SetSlow(factor float64) { e.slow = factor }

// Preempt makes the engine admit prompts without room for their answers, as vLLM does. Where a
// decoding job has no room for its next token, the job that was admitted last gives up its own.
// It comes first again, and its prompt and answer so far are computed again.
func (e *Engine) Preempt() { e.preempts = true }

// Line is the order in which jobs of several engines get room in one cache: that of
// their numbers. Without it, the engine that has most of the room would get all of
// it, for it is the one that gives some back.
type Line struct {
	waiting []int // numbers of jobs, one of an engine at most
}

// ahead tells whether a job waits that comes before number n.
func (l *Line) ahead(n int) bool {
	return l != nil && slices.ContainsFunc(l.waiting, func(other int) bool { return other < n })
}

func (l *Line) join(n int) {
	if l != nil && !slices.Contains(l.waiting, n) {
		l.waiting = append(l.waiting, n)
	}
}

func (l *Line) leave(n int) {
	if l != nil {
		l.waiting = slices.DeleteFunc(l.waiting, func(other int) bool { return other == n })
	}
}

// Add puts a job into the queue.
func (e *Engine) Add(j *Job) {
	if !j.Loaded {
		e.queue = append(e.queue, j)
		return
	}
	at := e.head
	for at < len(e.queue) && e.queue[at].Loaded {
		at++
	}
	if e.queue = slices.Insert(e.queue, at, j); at == e.head {
		e.refused = -1 // another one waits for room now
	}
}

// Drop gives the blocks of a job back that is Kept and over.
func (e *Engine) Drop(j *Job) { e.cache.Release(j.Chain, nil, j.held) }

// Waiting returns how many jobs are not admitted.
func (e *Engine) Waiting() int { return len(e.queue) - e.head }

// Usage returns the share of the KV memory in use. What is reserved for tokens that are not made
// yet does not count: engines do not know how long answers become.
func (e *Engine) Usage() float64 {
	ahead := 0
	for _, j := range e.decoding {
		ahead += max(0, j.held-(j.In+j.Out-(j.last-e.steps)+e.block-1)/e.block)
	}
	return e.cache.Usage() - float64(ahead)/float64(e.cache.capacity)
}

// Cache returns the engine's cache.
func (e *Engine) Cache() *Cache { return e.cache }

// Decoding calls f for each job that generates, with its tokens so far.
func (e *Engine) Decoding(f func(j *Job, tokens int)) {
	for _, j := range e.decoding {
		f(j, j.Out-(j.last-e.steps))
	}
}

// Begin begins a step and returns how long it takes; false if there is nothing to
// do, or no memory to do it.
func (e *Engine) Begin() (time.Duration, bool) {
	if e.preempts {
		e.grow()
	}
	tokens := len(e.decoding)
	attention := 0.0
	for tokens < e.model.Budget {
		j := e.next()
		if j == nil {
			break
		}
		n := min(j.tokens()-j.computed, e.model.Budget-tokens)
		attention += float64(n) * (float64(j.computed) + float64(n)/2)
		tokens += n
		if j.computed += n; j.computed == j.tokens() {
			e.finishing = append(e.finishing, j)
			e.prefill = nil
		}
	}
	if tokens == 0 {
		return 0, false
	}
	usage := float64(e.context) / float64(e.cache.capacity*e.block)
	ms := e.model.StepMS(len(e.decoding), e.context, tokens-len(e.decoding), attention, usage)
	return time.Duration(ms * e.slow * float64(time.Millisecond)), true
}

// next returns the job whose prompt is to be computed now, nil if there is none or
// it has to wait for memory.
func (e *Engine) next() *Job {
	if e.prefill != nil || e.head == len(e.queue) {
		return e.prefill
	}
	if e.refused == e.cache.changes {
		return nil // nothing has changed since there was no room
	}
	j := e.queue[e.head]
	held, ok := 0, false
	if !e.line.ahead(j.Number) {
		j.held = j.Blocks(e.block)
		if e.preempts {
			j.held = j.tokens()/e.block + 1
		}
		e.cache.job = j.Number
		held, ok = e.cache.Reserve(j.Chain, j.held)
	}
	if !ok {
		e.line.join(j.Number)
		e.refused = e.cache.changes
		return nil
	}
	e.refused = -1
	e.turns++
	j.turn = e.turns
	e.line.leave(j.Number)
	e.queue[e.head] = nil
	if e.head++; e.head == len(e.queue) {
		e.queue, e.head = e.queue[:0], 0
	} else if e.head > 1024 && e.head > len(e.queue)/2 {
		e.queue = e.queue[:copy(e.queue, e.queue[e.head:])]
		e.head = 0
	}
	// The last block of a prompt is always computed, also if it is held.
	j.computed, e.prefill = min(held, (j.In-1)/e.block)*e.block, j
	if j.Loaded {
		j.computed = j.In - 1
	}
	if j.made == 0 {
		j.Cached = j.computed
	}
	return j
}

// grow gives each decoding job room for its next token.
func (e *Engine) grow() {
	e.growing = append(e.growing[:0], e.decoding...)
	for _, j := range e.growing {
		for j.turn > 0 && j.held*e.block <= j.In+j.Out-(j.last-e.steps) {
			if e.cache.Grow() {
				j.held++
			} else {
				e.preempt()
			}
		}
	}
}

// preempt takes away the room of the job that was admitted last.
func (e *Engine) preempt() {
	j := e.prefill
	if e.prefill = nil; j == nil {
		at := 0
		for i := range e.decoding {
			if e.decoding[i].turn > e.decoding[at].turn {
				at = i
			}
		}
		j = heap.Remove(&e.decoding, at).(*Job)
		j.made = j.Out - (j.last - e.steps)
		e.context -= j.tokens()
	}
	j.turn, j.Loaded = 0, false
	e.cache.Release(j.Chain, nil, j.held)
	if e.head > 0 {
		e.head--
		e.queue[e.head] = j
	} else {
		e.queue = slices.Insert(e.queue, 0, j)
	}
}

// End ends the step. It returns the jobs whose first token came, and those that are
// over; some may be both. The slices are valid until the next call.
func (e *Engine) End() (first, over []*Job) {
	e.steps++
	e.context += len(e.decoding)
	e.over = e.over[:0]
	for len(e.decoding) > 0 && e.decoding[0].last == e.steps {
		j := heap.Pop(&e.decoding).(*Job)
		e.context -= j.In + j.Out
		e.end(j)
	}
	first = e.finishing[:0]
	for _, j := range e.finishing {
		if j.made == 0 {
			first = append(first, j)
		}
		if j.Out == j.made+1 {
			e.end(j)
			continue
		}
		j.last = e.steps + j.Out - j.made - 1
		e.context += j.tokens() + 1
		heap.Push(&e.decoding, j)
	}
	e.finishing = e.finishing[:0]
	return first, e.over
}

func (e *Engine) end(j *Job) {
	e.over = append(e.over, j)
	if j.Kept {
		return
	}
	e.chain = j.Chained(e.chain[:0], e.block)
	e.cache.job = j.Number
	e.cache.Release(j.Chain, e.chain[len(j.Chain):], j.held)
}

// jobs is a heap by last, then by Number.
type jobs []*Job

func (q jobs) Len() int      { return len(q) }
func (q jobs) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

func (q jobs) Less(i, j int) bool {
	if q[i].last != q[j].last {
		return q[i].last < q[j].last
	}
	return q[i].Number < q[j].Number
}

// Push implements heap.Interface.
func (q *jobs) Push(j any) { *q = append(*q, j.(*Job)) }

// Pop implements heap.Interface.
func (q *jobs) Pop() any {
	last := len(*q) - 1
	j := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return j
}
