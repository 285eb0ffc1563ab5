package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/snapshot"
	"go.uber.org/zap"
)

const (
	// recallWithin bounds the time for which a start waits for the storage.
	recallWithin = time.Second
	// lastWithin bounds the last snapshot: service managers kill a Caddy that takes long.
	lastWithin = 3 * time.Second
	// saveWithin bounds other snapshots, and retryAfter the time to the next attempt after
	// one that failed.
	saveWithin, retryAfter = time.Minute, 30 * time.Second
	// versionsApart is more than the versions that a store uses between its last snapshot
	// and its end.
	versionsApart = affinity.Version(24 * time.Hour)
	// turnsWithin is how long a turn of a session waits for the snapshot.
	turnsWithin = 5 * time.Second

	incidentSnapshots = "snapshots cannot be written"
)

// snapshots keep what the pool knows in a storage, so that it survives a restart.
type snapshots struct {
	mu       sync.Mutex
	place    *snapshot.Place // nil: the pool writes none
	tried    string          // the place whose head was read
	recalled *snapshot.Head  // of the snapshot to restore; its secret and seed are in use
	last     *snapshot.Head  // in place
	begun    time.Time       // of the snapshot that is being written; zero: none is
	started  bool            // restore has begun
	restored bool            // and has ended
	state    SnapshotState

	saving sync.Mutex    // one snapshot at a time
	saved  changes       // when the last one began
	wake   chan struct{} // capacity 1: place or interval may have changed
	ended  chan struct{} // closed when keepSnapshots has ended

	restoring atomic.Pointer[chan struct{}] // nil unless a snapshot is being restored; then closed
	stopOnce  sync.Once                     // flushes when Caddy stops
}

// SnapshotState is what became of the pool's snapshots.
type SnapshotState struct {
	On       bool          `json:"-"` // the pool writes snapshots
	Saved    time.Time     `json:"-"`
	Bytes    int64         `json:"bytes,omitzero"`
	Took     time.Duration `json:"-"`
	Errors   uint64        `json:"errors"` // failed snapshots
	Restored Restored      `json:"restored"`
}

// Restored counts what the pool took over from an earlier run.
type Restored struct {
	Sessions     int           `json:"sessions"`
	Expired      int           `json:"expired_sessions"`
	Responses    int           `json:"responses"`
	CachedTokens int64         `json:"cached_tokens"`
	Age          time.Duration `json:"-"` // of the snapshot
}

// changes tell whether there is anything new to save.
type changes struct {
	bookings uint64
	version  affinity.Version
	sessions int
}

// Snapshots returns what became of the pool's snapshots.
func (p *Pool) Snapshots() SnapshotState {
	s := &p.snapshots
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state.On = s.place != nil
	return s.state
}

// hasSnapshot returns whether the storage has a snapshot of this run, or of an earlier one that
// this run writes again. It keeps the sessions that engines hold.
func (p *Pool) hasSnapshot() bool {
	s := &p.snapshots
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.place != nil && s.last != nil
}

// Recall takes over the secret and the seeds of the snapshot in a place, because all that it
// holds is keyed by them. It does nothing to a pool that is in use. It waits for at most a
// second, and then the pool begins anew.
func (p *Pool) Recall(at *snapshot.Place) {
	s := &p.snapshots
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.servingSince.Load() != 0 || s.recalled != nil || s.tried == at.Name() {
		return
	}
	s.tried = at.Name()
	h, err := readHead(at)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		p.Logger().Warn("snapshot is ignored, and the pool begins anew", zap.String("key", at.Name()), zap.Error(err))
		return
	}
	p.key(h.Seed)
	p.Secret = h.Secret
	p.Sessions.Skip(h.Version + versionsApart)
	s.recalled, s.last = h, h
}

// AwaitRestored waits until the snapshot is restored, for a while. Without the bindings, the turn
// of a session that an engine holds would go to another one.
func (p *Pool) AwaitRestored(ctx context.Context) {
	over := p.snapshots.restoring.Load()
	if over == nil {
		return
	}
	timer := time.NewTimer(turnsWithin)
	defer timer.Stop()
	select {
	case <-*over:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// readHead reads the head in time, even from a storage that ignores its context.
func readHead(at *snapshot.Place) (h *snapshot.Head, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), recallWithin)
	defer cancel()
	type answer struct {
		head *snapshot.Head
		err  error
	}
	done := make(chan answer, 1)
	go func() {
		h, err := snapshot.ReadHead(ctx, at)
		done <- answer{h, err}
	}()
	select {
	case a := <-done:
		return a.head, a.err
	case <-ctx.Done():
		return nil, fmt.Errorf("reading the head: %w", ctx.Err())
	}
}

// Persist has the pool write its snapshots to a place, and restores those that Recall has
// found. nil ends that.
func (p *Pool) Persist(at *snapshot.Place) {
	s := &p.snapshots
	s.mu.Lock()
	if at != nil && s.place != nil && at.Name() != s.place.Name() {
		s.last, s.saved = nil, changes{}
	}
	s.place = at
	start := at != nil && !s.started
	s.started = s.started || start
	if start && s.recalled != nil {
		over := make(chan struct{})
		s.restoring.Store(&over)
	}
	s.mu.Unlock()
	if start {
		go p.keepSnapshots()
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// keepSnapshots restores the last snapshot, and then writes others until the pool ends.
func (p *Pool) keepSnapshots() {
	s := &p.snapshots
	defer close(s.ended)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-p.life.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	p.restore(ctx)
	if over := s.restoring.Swap(nil); over != nil {
		close(*over)
	}
	if ctx.Err() != nil {
		return // what is in the storage is more than what was restored
	}
	s.mu.Lock()
	s.restored = true
	s.mu.Unlock()
	var err error
	last := time.Now() // a reload does not put the next snapshot off
	timer := time.NewTimer(p.untilNext(nil))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-timer.C:
			err, last = p.save(ctx, saveWithin), time.Now()
		}
		timer.Reset(time.Until(last.Add(p.untilNext(err))))
	}
}

// untilNext returns the time to the next snapshot. The last one ended with the error.
func (p *Pool) untilNext(err error) time.Duration {
	wait := cmp.Or(p.Settings.Load().Persist, DefaultPersist)
	if err != nil {
		wait = min(wait, retryAfter)
	}
	return max(wait, minPersist)
}

// FlushOnce writes a snapshot now, if there is anything new. It waits for at most three seconds.
// Only the first call counts: Caddy stops, and each handler of the pool calls it.
func (p *Pool) FlushOnce() { p.snapshots.stopOnce.Do(func() { p.flush(lastWithin) }) }

// flush writes a snapshot now, if there is anything new, and waits for it for a while.
func (p *Pool) flush(within time.Duration) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = p.save(context.Background(), within) // it is logged
	}()
	select {
	case <-done:
	case <-time.After(within):
	}
}

// endSnapshots ends the snapshots with a last one.
func (p *Pool) endSnapshots() {
	s := &p.snapshots
	s.mu.Lock()
	started := s.started
	s.mu.Unlock()
	if !started {
		return
	}
	begun := time.Now()
	select {
	case <-s.ended:
		p.flush(lastWithin - time.Since(begun))
	case <-time.After(lastWithin): // the storage does not answer
	}
}

// watchSnapshots raises a condition if the storage does not answer.
func (p *Pool) watchSnapshots(t time.Time) {
	s := &p.snapshots
	s.mu.Lock()
	hangs := !s.begun.IsZero() && t.Sub(s.begun) > saveWithin
	s.mu.Unlock()
	if hangs {
		p.Incidents.Raise(t, incidentSnapshots, p.Logger)
	}
}
