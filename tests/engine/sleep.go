package engine

import (
	"cmp"
	"net/http"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// The paths of a vLLM's sleep.
const (
	SleepPath = "/sleep"
	WakePath  = "/wake_up"
)

// sleep puts the engine to sleep, without its caches.
func (x *exchange) sleep() {
	level, err := strconv.Atoi(cmp.Or(x.r.URL.Query().Get("level"), "1"))
	if err != nil || level < 0 || level > 2 {
		x.reject(&apiError{http.StatusBadRequest, "invalid level", "BadRequestError", ""})
		return
	}
	x.life.clear()
	x.life.asleep.Store(int64(level))
	x.fine()
}

// wakeUp wakes it. It needs its weights before its cache.
func (x *exchange) wakeUp() {
	select {
	case <-time.After(x.engine.cfg.WakeTime):
	case <-x.r.Context().Done():
		return
	case <-x.life.dead:
		return
	}
	if x.r.URL.Query().Get("tags") != "weights" {
		x.life.asleep.Store(0)
	}
	x.fine()
}

// wakes holds a request until the engine is awake, as a vLLM does. It returns false if that never was.
func (x *exchange) wakes() bool {
	for x.life.asleep.Load() > 0 {
		x.note(func(r *Record) { r.Held = true })
		select {
		case <-time.After(5 * time.Millisecond):
		case <-x.ctx.Done():
			x.gone()
			return false
		case <-x.life.dead:
			canned.CloseConn(x.w, false)
			x.gone()
			return false
		}
	}
	return true
}
