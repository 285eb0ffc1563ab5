package events

import (
	"context"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
	"go.uber.org/zap"
)

// Status is what an operator sees of a stream.
type Status struct {
	State     State
	Complete  bool   // what the sink holds is all that the publisher holds
	Connected bool   // the subscription stands
	Seq       uint64 // of the last batch that the sink got
	Err       string // what ended the last connection or replay; empty while all is well

	Gaps       uint64 // holes between live batches
	Replays    uint64 // replays begun
	Reconnects uint64 // connections after the first
	Restarts   uint64 // of the publisher, seen by a falling sequence
	Malformed  uint64 // live messages that are not topic, sequence number and payload
}

// Status returns the stream's condition. Any goroutine may call it.
func (s *Stream) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

func (s *Stream) count(change func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.status)
}

// noteEvery is the least time between two reports of a degradation in the log.
const noteEvery = 30 * time.Second

// notes keep the log short while a connection comes and goes.
type notes struct {
	ever     bool      // the stream was connected once
	lostAt   time.Time // zero: connected, or never was
	noted    bool      // the log has the beginning of a degradation and not its end
	notedAt  time.Time
	badSince time.Time // zero: all is well
	unnoted  int       // degradations that the log does not have
	partial  time.Time // when the log had an incomplete replay last
}

// enter reports a state to the sink and to Status.
func (s *Stream) enter(state State, complete bool) {
	s.mu.Lock()
	changed := s.status.State != state || s.status.Complete != complete
	s.status.State, s.status.Complete = state, complete
	s.status.Seq = s.p.next - 1
	if !s.p.anchored || s.p.void {
		s.status.Seq = 0
	}
	if state == Live {
		s.status.Err = ""
	}
	s.mu.Unlock()
	if changed {
		s.sink.State(state, complete)
	}
	if state == Live {
		s.recovered(complete)
	}
}

// degraded logs the beginning of a degradation, or counts it if the log had one recently.
func (s *Stream) degraded(why string, err error) {
	if err != nil {
		s.count(func(st *Status) { st.Err = err.Error() })
	} else {
		s.count(func(st *Status) { st.Err = why })
	}
	now := time.Now()
	if s.n.badSince.IsZero() {
		s.n.badSince = now
	}
	if s.n.noted || !s.n.notedAt.IsZero() && now.Sub(s.n.notedAt) < noteEvery {
		s.n.unnoted++
		return
	}
	s.n.noted, s.n.notedAt = true, now
	s.log.Warn("KV event stream is degraded", zap.String("why", why), zap.Error(err),
		zap.Stringer("state", s.Status().State), zap.Int("unlogged_since_last", s.n.unnoted))
	s.n.unnoted = 0
}

// recovered logs the end of a degradation whose beginning is in the log.
func (s *Stream) recovered(complete bool) {
	if s.n.noted {
		s.log.Warn("KV event stream has recovered", zap.Duration("after", time.Since(s.n.badSince)), zap.Bool("complete", complete))
	}
	s.n.noted, s.n.badSince = false, time.Time{}
}

// connected notes a new subscription.
func (s *Stream) connected() {
	s.count(func(st *Status) {
		st.Connected = true
		if s.n.ever {
			st.Reconnects++
		}
	})
	s.n.ever, s.n.lostAt = true, time.Time{}
	if s.cfg.Replay == "" { // such a stream gets no better than connected
		s.count(func(st *Status) { st.Err = "" })
		s.recovered(false)
	}
}

// lost notes the end of a subscription.
func (s *Stream) lost(ctx context.Context, err error) {
	s.count(func(st *Status) { st.Connected = false })
	s.n.lostAt = time.Now()
	if ctx.Err() != nil {
		return
	}
	s.enter(Gap, false)
	s.degraded("the connection is lost", err)
}

// unreachable notes a failed connection.
func (s *Stream) unreachable(err error) {
	s.degraded("the publisher cannot be reached", err)
	s.expire()
}

// expire makes void what the sink holds if the publisher has been out of reach for too long.
func (s *Stream) expire() {
	if s.n.lostAt.IsZero() || s.p.void || time.Since(s.n.lostAt) < staleAfter {
		return
	}
	s.drop("the publisher cannot be reached")
	s.enter(Untrusted, false)
}

// partial logs that a replay did not reach back to the publisher's first batch.
func (s *Stream) partial(first uint64) {
	if !s.n.partial.IsZero() && time.Since(s.n.partial) < noteEvery {
		return
	}
	s.n.partial = time.Now()
	s.log.Warn("KV event replay is incomplete: the publisher's buffer does not reach back to its first batch",
		zap.Uint64("buffer_begins_at", first))
}

// malformed counts a live message that is no batch, and logs the first.
func (s *Stream) malformed(m *zmtp.Message) {
	first := false
	s.count(func(st *Status) {
		st.Malformed++
		first = st.Malformed == 1
	})
	if first {
		s.log.Warn("KV event stream has a message that is not topic, sequence number and payload; it is ignored",
			zap.Int("frames", m.Frames()), zap.Int("bytes", m.Size()))
	}
}
