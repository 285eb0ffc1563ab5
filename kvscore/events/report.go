package events

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
	"go.uber.org/zap"
)

// Status is what an operator sees of a stream.
type Status struct {
	State     State  `json:"state"`
	Complete  bool   `json:"complete"`       // what the sink holds is all that the publisher holds
	Connected bool   `json:"connected"`      // the subscription stands
	Seq       uint64 `json:"sequence"`       // of the last batch that the sink got
	Err       string `json:"error,omitzero"` // what ended the last connection or replay; empty while all is well

	Gaps       uint64 `json:"gaps"`       // holes between live batches
	Replays    uint64 `json:"replays"`    // replays begun
	Reconnects uint64 `json:"reconnects"` // connections after the first
	Restarts   uint64 `json:"restarts"`   // of the publisher: the sequence fell, or the last batch is another one
	Malformed  uint64 `json:"-"`          // live messages that are not topic, sequence number and payload
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

// noted is what the log has, so that it stays short while a connection comes and goes.
type noted struct {
	bad     bool      // the beginning of a degradation, and not its end
	at      time.Time // of that beginning, or of the last one
	partial bool      // that a replay was incomplete
}

// report updates Status, and returns whether the state has changed.
func (s *Stream) report(state State, complete bool) (changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := &s.status
	changed = st.State != state || st.Complete != complete
	st.State, st.Complete, st.Seq = state, complete, max(s.at.next, 1)-1
	if state == Live {
		st.Err = ""
	}
	return changed
}

// degraded logs the beginning of a degradation, unless the log had one recently.
func (s *Stream) degraded(why string, err error) {
	s.count(func(st *Status) {
		if st.Err = why; err != nil {
			st.Err = err.Error()
		}
	})
	now := time.Now()
	if s.noted.bad || !s.noted.at.IsZero() && now.Sub(s.noted.at) < noteEvery {
		return
	}
	s.noted.bad, s.noted.at = true, now
	s.log.Warn("KV event stream is degraded", zap.String("why", why), zap.Error(err), zap.Stringer("state", s.at.state))
}

func (s *Stream) recovered() {
	if s.noted.bad {
		s.noted.bad = false
		s.log.Warn("KV event stream has recovered",
			zap.Duration("after", time.Since(s.noted.at)), zap.Bool("complete", s.at.complete))
	}
}

func (s *Stream) connected() {
	s.count(func(st *Status) {
		st.Connected = true
		if s.at.state != Unknown {
			st.Reconnects++
		}
		if s.cfg.Replay == "" {
			st.Err = ""
		}
	})
	if s.cfg.Replay == "" { // such a stream gets no better than connected
		s.recovered()
	}
}

// partial logs the first replay that did not reach back to the publisher's first batch.
func (s *Stream) partial(first uint64) {
	if !s.noted.partial {
		s.noted.partial = true
		s.log.Warn("KV event replay is incomplete: the publisher's buffer does not reach back to its first batch",
			zap.Uint64("buffer_begins_at", first))
	}
}

// malformed counts a live message that is no batch, and logs the first.
func (s *Stream) malformed(m zmtp.Message) {
	first := false
	s.count(func(st *Status) {
		st.Malformed++
		first = st.Malformed == 1
	})
	if first {
		s.log.Warn("KV event stream has a message that is not topic, sequence number and payload; it is ignored",
			zap.Int("frames", len(m)), zap.Int("bytes", m.Size()))
	}
}
