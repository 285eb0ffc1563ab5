package journal

import (
	"encoding/binary"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/quota"
)

// Charged records a change of what a tenant has used. Other routers do not get that of another one.
func (j *Journal) Charged(now time.Time, c quota.Change, remote bool) {
	if !j.on.Load() {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.add(record{at: now.UnixMilli(), disk: remote, write: func(e *Encoder, at int64, _ []uint64) { e.change(at, &c) }}, nil)
}

// Stands records how a tenant's account stands, for logs on disk.
func (j *Journal) Stands(now time.Time, s quota.State) {
	if !j.on.Load() {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.add(record{at: now.UnixMilli(), disk: true, write: func(e *Encoder, at int64, _ []uint64) { e.Tenant(at, &s) }}, nil)
}

func (e *Encoder) account(k quota.Key) {
	e.fields = binary.LittleEndian.AppendUint64(e.fields, k.Tenant)
	if e.flags(k.Class != 0); k.Class != 0 {
		e.fields = binary.LittleEndian.AppendUint64(e.fields, k.Class)
	}
}

func (e *Encoder) change(at int64, c *quota.Change) {
	e.begin(KindQuota, at)
	e.account(c.Key)
	for _, n := range []int64{c.Requests, c.Tokens, int64(c.Running)} {
		e.fields = binary.AppendVarint(e.fields, n)
	}
	e.number(c.Age.Milliseconds())
	e.end()
}

// Tenant writes how a tenant's account stands.
func (e *Encoder) Tenant(at int64, s *quota.State) {
	e.begin(KindTenant, at)
	e.account(s.Key)
	for _, l := range s.Levels {
		e.fields = binary.AppendVarint(append(e.fields, byte(l.Of)), int64(l.Per))
		e.number(l.Used)
		e.number(l.Period)
	}
	e.end()
}

func (r *reader) account() (k quota.Key) {
	k.Tenant = r.fixed()
	if r.flags()&1 != 0 {
		k.Class = r.fixed()
	}
	return k
}

func (r *reader) change() (c quota.Change) {
	c.Key, c.Requests, c.Tokens = r.account(), r.varint(), r.varint()
	c.Running = int(min(max(r.varint(), -1), 1))
	c.Age = r.millis()
	return c
}

const maxLevels = 64

func (r *reader) tenant() (s quota.State) {
	s.Key = r.account()
	for len(r.b) > 0 && len(s.Levels) < maxLevels {
		of := quota.Unit(r.flags())
		s.Levels = append(s.Levels, quota.Level{Of: of, Per: quota.Window(r.varint()), Used: r.count(), Period: r.count()})
	}
	return s
}
