package handler

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap/zapcore"
)

// logFields are what the access log says of a request's routing. Session keys
// are not logged: they are secrets to somebody.
type logFields struct {
	worker    uint64
	upstream  string
	rank      uint32
	reason    string
	outcome   string
	attempts  int
	overlap   int64
	predicted int64
	prompt    int64
	waited    time.Duration // in the queue
	answer    *observer
}

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (f logFields) MarshalLogObject(e zapcore.ObjectEncoder) error {
	e.AddUint64("worker", f.worker)
	e.AddString("upstream", f.upstream)
	e.AddUint32("dp_rank", f.rank)
	e.AddString("reason", f.reason)
	e.AddString("outcome", f.outcome)
	e.AddInt("attempts", f.attempts)
	e.AddInt64("overlap_blocks", f.overlap)
	e.AddInt64("predicted_cached_tokens", f.predicted)
	e.AddInt64("estimated_prompt_tokens", f.prompt)
	if f.waited > 0 {
		e.AddDuration("queue_wait", f.waited)
	}
	o := f.answer
	if o == nil || o.reader == nil {
		return nil
	}
	if !o.first.IsZero() {
		e.AddDuration("ttft", o.first.Sub(o.rt.start))
	}
	prompt, completion, cached := o.usage()
	for name, n := range map[string]int64{"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached} {
		if n >= 0 {
			e.AddInt64(name, n)
		}
	}
	return nil
}

func isCanceled(err error) bool { return errors.Is(err, context.Canceled) }
