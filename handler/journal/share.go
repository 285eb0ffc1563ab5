package journal

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/zeebo/xxh3"
)

const (
	// batchDelay is how long records wait for others, which the same append sends. appendGap is the least
	// time between two appends.
	batchDelay, appendGap = time.Millisecond, 4 * time.Millisecond
	// heartbeat is the time between two entries of a router that has no records.
	heartbeat = time.Second
	// appendTimeout bounds one append, and readTimeout one read. The choice waits for neither.
	appendTimeout, readTimeout = 2 * time.Second, 2 * time.Second
	// retryDelay is the time between two attempts at a stream that fails.
	retryDelay = time.Second
	// entriesKept is the most memory that is kept for what the next append sends, in bytes.
	entriesKept = 1 << 20
	// PastBytes and PastTime are how much of a stream stays. A router starts a new epoch within
	// half of that, so that one that joins understands the rest.
	PastBytes = 64 << 20
	PastTime  = 15 * time.Minute
)

// Keys key all hashes. All routers that share a stream have the same ones.
type Keys struct {
	Secret affinity.Secret
	Seed   uint64
}

// id identifies the keys, and does not lead back to them.
func (k *Keys) id() uint64 { return xxh3.HashSeed(k.Secret[:], k.Seed) }

func (k *Keys) bytes() []byte {
	return binary.LittleEndian.AppendUint64(slices.Clone(k.Secret[:]), k.Seed)
}

// parseKeys returns false for bytes that are no keys.
func parseKeys(b []byte) (k Keys, ok bool) {
	if len(b) != len(k.Secret)+8 {
		return k, false
	}
	copy(k.Secret[:], b)
	k.Seed = binary.LittleEndian.Uint64(b[len(k.Secret):])
	return k, true
}

// Stream is a log that several routers append to and read. Its methods may be called at the same
// time, and return within the context's time.
type Stream interface {
	// Keys returns the keys of all routers: its own if there are none yet.
	Keys(ctx context.Context, own Keys) (Keys, error)
	// Append appends what a router sends.
	Append(ctx context.Context, s *Sent) error
	// Read passes what follows a position to each, the oldest first, and returns the position behind
	// that. If there is nothing, it waits for so long. The empty position is the beginning. What each
	// gets is valid during the call.
	Read(ctx context.Context, from string, wait time.Duration, each func(*Sent)) (to string, err error)
	// Trim removes what is older than PastTime, and all but about the last entries.
	Trim(ctx context.Context, entries int64) error
	Close()
}

// Claims are what must be certain among routers: who has a name, and with which value. The methods
// return within the context's time.
type Claims interface {
	// Claim claims a name for a time. It returns false if another has it.
	Claim(ctx context.Context, name, value string, ttl time.Duration) (mine bool, err error)
	// Find returns the value, empty if nobody has the name, and the time that is left.
	Find(ctx context.Context, name string) (value string, left time.Duration, err error)
	// Renew gives a claim of the value a new time; 0 ends it. It returns false if there is none of that
	// value.
	Renew(ctx context.Context, name, value string, ttl time.Duration) (ok bool, err error)
}

// Claims returns the claims of the stream's server, nil while that fails.
func (s *Sharer) Claims() Claims {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.status.Connected {
		return nil
	}
	return s.claims
}

// Sharer shares the records of one pool with other routers.
type Sharer struct {
	// Name is this router's.
	Name string
	// Dial connects to the stream.
	Dial func() (Stream, error)
	// Keys returns this router's keys, and Adopt replaces them.
	Keys  func() Keys
	Adopt func(Keys)
	// Source says what the others must know besides.
	Source *Source
	// Follower applies their records. Its Refuse is the Sharer's.
	Follower *Follower
	// Failed gets each error of the stream, Silent each router that has ended, and Refused each that
	// must not be followed.
	Failed          func(error)
	Silent, Refused func(*Peer)

	id     uint64
	outlet *Outlet
	stream Stream
	redial func()      // ends the use of the stream
	stale  atomic.Bool // the stream must be dialed anew

	// of the writer alone
	encoder     Encoder
	entries     bytes.Buffer
	number      uint64
	epoch       uint64    // the current one: the number of its first entry
	lostNoticed uint64    // of the outlet's lost records
	needsRun    bool      // records are lost, so the next epoch starts a new run
	lastAppend  time.Time // that succeeded
	epochStart  time.Time
	epochHead   Head

	mu           sync.Mutex
	status       ShareStatus
	claims       Claims
	entriesRead  uint64
	meanEntry    float64   // size of an entry, in bytes
	epochBytes   int64     // that were read in this epoch
	peerJoined   bool      // another router has joined in this epoch
	sendsAll     bool      // the next epoch repeats what all routers know, for one that has joined
	sendsTenants bool      // the next entry has the state of all tenants; all routers send it, for the first one may have ended
	appendStart  time.Time // of the last append
}

// ShareStatus is how the sharing fares.
type ShareStatus struct {
	Connected bool   `json:"connected"`
	Error     string `json:"error,omitempty"` // the last one, while not connected
	Errors    uint64 `json:"errors"`
	Lost      uint64 `json:"lost_records"` // there was no room for them, or no stream
	// Late is the time until this router reads its own entries in the stream, in milliseconds.
	Late  float64 `json:"late_ms"`
	Bytes uint64  `json:"sent_bytes"`
	Peers []Peer  `json:"routers"`
}

// Status returns how the sharing fares.
func (s *Sharer) Status() ShareStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.status
	st.Peers = slices.Clone(st.Peers)
	slices.SortFunc(st.Peers, func(a, b Peer) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return st
}

// Run shares what the outlet takes until the context ends.
func (s *Sharer) Run(ctx context.Context, o *Outlet) {
	s.outlet = o
	s.encoder.out = func(entry []byte) { s.entries.Write(entry) }
	s.Follower.Refuse = func(h *Head) error { return s.head().agrees(h) }
	s.Follower.Joined, s.Follower.Refused = s.noteJoined, s.Refused
	for ctx.Err() == nil {
		if stream, err := s.Dial(); err != nil {
			s.fail(ctx, err)
		} else {
			s.stream = stream
			s.mu.Lock()
			s.claims, _ = stream.(Claims)
			s.mu.Unlock()
			for ctx.Err() == nil && !s.stale.Swap(false) {
				s.share(ctx)
			}
			stream.Close()
		}
	}
}

// share reads and writes until the context ends, the keys change, or the stream is stale.
func (s *Sharer) share(ctx context.Context) {
	ctx, s.redial = context.WithCancel(ctx)
	defer func() {
		s.redial()
		s.redial = nil
	}()
	for {
		within, end := context.WithTimeout(ctx, appendTimeout)
		_, err := s.agree(within)
		end()
		if err == nil {
			break
		}
		if s.fail(ctx, err); ctx.Err() != nil {
			return
		}
	}
	s.id, s.number, s.epoch = rand.Uint64(), 0, 0 //nolint:gosec // only differs
	defer s.Follower.Close()
	var reads sync.WaitGroup
	reads.Go(func() { s.readAll(ctx) })
	s.writeAll(ctx)
	s.redial()
	reads.Wait()
}

// agree takes over the keys of the other routers. It returns whether they have changed.
func (s *Sharer) agree(ctx context.Context) (changed bool, err error) {
	own := s.Keys()
	keys, err := s.stream.Keys(ctx, own)
	if changed = err == nil && keys != own; changed {
		s.Adopt(keys)
	}
	return changed, err
}

// fail notes an error of the stream, and waits for a while.
func (s *Sharer) fail(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	s.status.Connected, s.status.Error = false, err.Error()
	s.status.Errors++
	s.mu.Unlock()
	s.Failed(err)
	pause(ctx, retryDelay)
	if isStale(err) && s.redial != nil {
		s.stale.Store(true)
		s.redial()
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// readAll reads the stream until the context ends: first its past, then what comes.
func (s *Sharer) readAll(ctx context.Context) {
	position, wait := "", time.Duration(0)
	listed, lastOwnEntry := time.Time{}, time.Now()
	for ctx.Err() == nil {
		none := true
		within, end := context.WithTimeout(ctx, readTimeout)
		to, err := s.stream.Read(within, position, wait, func(e *Sent) {
			none = false
			s.take(e, wait == 0)
			if e.Router == s.id {
				lastOwnEntry, wait = time.Now(), heartbeat // what follows is not the past
			}
		})
		end()
		now := time.Now()
		if now.Sub(listed) > heartbeat/2 {
			listed = now
			for _, p := range s.Follower.Expire(now) {
				s.Silent(&p)
			}
			s.mu.Lock()
			s.status.Peers = s.Follower.Peers()
			s.mu.Unlock()
			s.countRouters()
		}
		if err != nil {
			s.fail(ctx, err)
			continue
		}
		if position = to; none {
			wait = heartbeat // that was the past
		}
		if now.Sub(lastOwnEntry) > silence && s.isAppending(now) {
			// The server has another stream, on another clock: it was started anew.
			s.fail(ctx, errors.New("this router's own words are missing in the stream, which it reads anew"))
			position, wait, lastOwnEntry = "", 0, time.Now()
		}
	}
}

// isAppending returns whether the last append was recent and succeeded.
func (s *Sharer) isAppending(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status.Connected && now.Sub(s.appendStart) < 2*heartbeat
}

func (s *Sharer) take(e *Sent, past bool) {
	now, n := time.Now(), len(e.Entries)+sentBytes
	s.mu.Lock()
	s.entriesRead++
	s.meanEntry += (float64(n) - s.meanEntry) / min(1000, float64(s.entriesRead))
	s.epochBytes += int64(n)
	if e.Router == s.id {
		s.status.Late = float64(now.Sub(s.appendStart)) / float64(time.Millisecond)
	}
	s.mu.Unlock()
	if e.Router != s.id {
		s.Follower.Take(now, e, past)
	}
}

// sentBytes is about what a stream needs for an entry besides.
const sentBytes = 64

// countRouters tells the scheduler how many routers there are, and which of them this one is.
func (s *Sharer) countRouters() {
	self, n := 0, 1
	for _, p := range s.Follower.Peers() {
		if p.Live && p.ID != s.id {
			n++
			if p.ID < s.id {
				self++
			}
		}
	}
	s.Follower.Scheduler.SetRouters(self, n)
}

func (s *Sharer) noteJoined(joined *Peer) {
	first := true // of those that can send it what all know
	for _, p := range s.Follower.Peers() {
		first = first && (p.ID > s.id || p.ID == joined.ID || !p.Live)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.peerJoined, s.sendsAll, s.sendsTenants = true, s.sendsAll || first, true
	select {
	case s.outlet.wake <- struct{}{}: // at once
	default:
	}
}

// writeAll writes to the stream until the keys change, or the context ends. Then it writes once more.
func (s *Sharer) writeAll(ctx context.Context) {
	s.needsRun = true
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for ticked := true; ; {
		within, end := context.WithTimeout(ctx, appendTimeout)
		err := s.write(within, time.Now())
		changed := false
		if err == nil && ticked {
			if changed, err = s.agree(within); err == nil {
				err = s.stream.Trim(within, s.mostEntries())
			}
		}
		end()
		if changed {
			return
		}
		if err != nil {
			s.needsRun = true
			s.fail(ctx, err)
		}
		select {
		case <-s.outlet.wake:
			pause(ctx, max(batchDelay, appendGap-time.Since(s.lastAppend)))
			ticked = false
		case <-tick.C:
			ticked = true
		case <-ctx.Done():
			last, end := context.WithTimeout(context.Background(), heartbeat)
			defer end()
			_ = s.write(last, time.Now())
			return
		}
	}
}

// mostEntries returns about how many entries have PastBytes.
func (s *Sharer) mostEntries() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int64(PastBytes / max(s.meanEntry, sentBytes))
}

// write appends an entry with the records that wait. Without any, it is a heartbeat.
func (s *Sharer) write(ctx context.Context, now time.Time) error {
	s.entries.Reset()
	s.startEpochIfDue(now)
	s.mu.Lock()
	tenants := s.sendsTenants
	s.sendsTenants = false
	s.mu.Unlock()
	s.outlet.Write(&s.encoder, s.Source.Dial)
	if tenants {
		s.Source.Tenants(&s.encoder, now, 0)
	}
	s.entries.Write(s.encoder.Entry())
	s.number++
	n := s.entries.Len()
	s.mu.Lock()
	s.appendStart = now
	s.mu.Unlock()
	err := s.stream.Append(ctx, &Sent{Router: s.id, Number: s.number, Epoch: s.epoch, Entries: s.entries.Bytes()})
	if err != nil || s.entries.Cap() > entriesKept {
		s.entries = bytes.Buffer{} // the client may still read it, or it is large
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status.Lost = s.outlet.Lost(); err != nil {
		return err
	}
	s.lastAppend = now
	s.status.Connected, s.status.Error = true, ""
	s.status.Bytes += uint64(n) //nolint:gosec // positive
	return nil
}

// startEpochIfDue starts a new epoch if it is time, so that a router that joins understands what follows.
// If records are lost, a new run begins.
func (s *Sharer) startEpochIfDue(now time.Time) {
	if n := s.outlet.Lost(); n > s.lostNoticed {
		s.lostNoticed, s.needsRun = n, true
	}
	h := s.head()
	s.mu.Lock()
	since := now.Sub(s.epochStart)
	joined, all := s.peerJoined && since > minEpoch, s.sendsAll
	changed := h.agrees(&s.epochHead) != nil // engines report the size of their blocks
	due := s.needsRun || changed || joined || all || since > PastTime/2 || s.epochBytes > PastBytes/2
	if due {
		s.epochBytes, s.peerJoined, s.sendsAll = 0, false, false
	}
	s.mu.Unlock()
	if !due && !s.encoder.Full() {
		return
	}
	used := time.Duration(0)
	switch {
	case all:
	case s.needsRun && !s.lastAppend.IsZero():
		used = now.Sub(s.lastAppend) + heartbeat
	default:
		used = -1
	}
	if s.needsRun {
		s.needsRun = false
		s.encoder.NewRun()
	}
	s.epochStart, s.epochHead, s.epoch = now, *h, s.number+1
	s.encoder.StartEpoch(now, h)
	s.encoder.Write(&Record{Kind: KindState, At: now, Body: s.Source.State()}, nil)
	if used >= 0 {
		s.Source.Bindings(&s.encoder, now, used)
	}
}

// minEpoch is the least length of an epoch that ends because a router joins.
const minEpoch = 10 * time.Second

// head returns what others must know before all else. The secret is not among it.
func (s *Sharer) head() *Head {
	h, keys := s.Source.Head(), s.Keys()
	h.Secret, h.Seed, h.Keys, h.Name = affinity.Secret{}, 0, keys.id(), s.Name
	return h
}

// agrees returns why a router must not follow one with another head: the hashes of the one mean
// nothing to the other.
func (h *Head) agrees(o *Head) error {
	switch {
	case h.Keys != o.Keys:
		return errors.New("its hashes have another secret")
	case h.TextBlock != o.TextBlock:
		return fmt.Errorf("its index has a text_block of %d bytes, and this one has %d", o.TextBlock, h.TextBlock)
	case h.BlockSize != o.BlockSize:
		return fmt.Errorf("its index has a block_size of %d tokens, and this one has %d", o.BlockSize, h.BlockSize)
	}
	return nil
}
