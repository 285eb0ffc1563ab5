package cache

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/exact"
)

// unconfirmed are the prompts that were sent lately to targets with feeds. They count as held
// until the engines' events arrive: see [Caches.confirm].
type unconfirmed struct {
	index    *approx.Index // its slots are the feeds' numbers
	n        int           // tickets in the index
	ends     map[end]*Ticket
	computed []expiry    // in the order of their times
	now      time.Time   // the latest that was told
	match    exact.Match // memory for told
}

// expiry is a ticket's time to expire. If it is no longer the ticket's, another follows.
type expiry struct {
	ticket *Ticket
	until  time.Time
}

// end is the last block of a prompt that was sent to a target with a feed.
type end struct {
	feed  int // its number
	block uint64
}

// waiting is a ticket's part in the unconfirmed prompts.
type waiting struct {
	id    *Identity // until the first token, if the engine does not reuse a prefill under way
	feed  *Feed
	size  int // of the feed's blocks
	n     int // blocks of the prompt
	ref   approx.Ref
	end   end
	until time.Time // zero before the first token
}

const (
	// eventTime is how long after its first token, or its end, a prompt counts as held before
	// an event has said so. While it decodes, SGLang publishes at every 40th step.
	eventTime = 5 * time.Second
	// unconfirmedMemory bounds the memory of the unconfirmed prompts, in bytes.
	unconfirmedMemory = 64 << 20
)

// add counts the prompt of a new ticket as held until its event arrives. c.mu is held, as in all
// functions below.
func (c *Caches) add(now time.Time, t *Ticket, p *Prompt, v *View) {
	f := t.slot.feed.Load()
	l, info := v.look(f)
	if l == nil {
		return
	}
	if l.isText {
		c.begin(now, t, p, l, f, info)
		return
	}
	t.waits.feed, t.waits.size, t.waits.n = f, l.id.BlockTokens, len(l.id.Blocks)
	if l.depth(f, Device) == int64(len(l.id.Blocks)) {
		return // events tell all of it
	}
	if t.waits.id = l.id; info.HitsInFlight {
		c.hold(t)
	}
}

// hold makes the prompt count as held.
func (c *Caches) hold(t *Ticket) {
	w, u := &t.waits, &c.unconfirmed
	id := w.id
	w.id = nil
	if id == nil || w.feed.closed {
		return
	}
	u.index.SetCapacity(w.feed.number, 0)
	chain := id.chain()
	w.ref, _ = u.index.Acquire(w.feed.number, &chain, -1)
	if w.ref != (approx.Ref{}) {
		u.n++
		w.end = end{w.feed.number, id.Blocks[len(id.Blocks)-1]}
		u.ends[w.end] = t
	}
}

// confirm drops the prompts of which an event has named the last block. The index of events says
// from now on whether the engine holds them, also if it evicts them soon.
func (c *Caches) confirm(f *Feed, blocks []uint64) {
	var found []end
	c.mu.RLock()
	for _, b := range blocks {
		if e := (end{f.number, b}); c.unconfirmed.ends[e] != nil {
			found = append(found, e)
		}
	}
	c.mu.RUnlock()
	if len(found) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range found {
		if t := c.unconfirmed.ends[e]; t != nil {
			c.drop(t)
		}
	}
}

// confirmSoon lets the prompt count as held for a while longer: it is computed.
func (c *Caches) confirmSoon(t *Ticket) {
	c.hold(t)
	w, u := &t.waits, &c.unconfirmed
	if w.ref == (approx.Ref{}) || !w.until.IsZero() {
		return
	}
	w.until = u.now.Add(eventTime)
	u.computed = append(u.computed, expiry{t, w.until})
}

// answered makes the prompt and its answer count as held, if events have not told of both, and
// not of the eviction of the prompt.
func (c *Caches) answered(t *Ticket, a *Answer) {
	w, u := &t.waits, &c.unconfirmed
	if w.feed == nil || a == nil {
		return
	}
	for i := range a.Identities {
		id := &a.Identities[i]
		if id.BlockTokens != w.size || len(id.Blocks) == 0 {
			continue
		}
		awaited, told := w.ref != (approx.Ref{}), 0
		c.drop(t)
		c.exact.Match(id.Root, &u.match, id.Blocks)
		if of := u.match.Depth[Device]; w.feed.number < len(of) {
			told = int(of[w.feed.number])
		}
		if told < len(id.Blocks) && (awaited || told >= w.n) {
			w.id, w.until = id, time.Time{}
		}
	}
}

// drop makes the prompt count as held no more.
func (c *Caches) drop(t *Ticket) {
	w := &t.waits
	w.id = nil
	if w.ref != (approx.Ref{}) {
		c.unconfirmed.index.Release(w.ref, false)
		w.ref = approx.Ref{}
		c.unconfirmed.n--
		if c.unconfirmed.ends[w.end] == t {
			delete(c.unconfirmed.ends, w.end)
		}
	}
}

// tell notes the time.
func (u *unconfirmed) tell(now time.Time) {
	if now.After(u.now) {
		u.now = now
	}
}

// due reports whether the time of a prompt is over.
func (u *unconfirmed) due(now time.Time) bool {
	return len(u.computed) > 0 && !u.computed[0].until.After(now)
}

// expire drops the prompts whose time is over.
func (c *Caches) expire(now time.Time) {
	u := &c.unconfirmed
	u.tell(now)
	for u.due(u.now) {
		e := u.computed[0]
		u.computed[0] = expiry{}
		u.computed = u.computed[1:]
		if e.ticket.waits.until.Equal(e.until) {
			c.drop(e.ticket)
		}
	}
}
