package pool

import (
	"context"
	"slices"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
)

// log is the log of a pool, by its name.
type log struct {
	Name   string
	events chan event // for Caddy's events app
}

// logs names the logs of all pools, so that operators can direct them with the handler's.
type logs struct{}

func (logs) CaddyModule() caddy.ModuleInfo { return caddy.ModuleInfo{ID: "http.handlers.kv_router"} }

// Logger returns the logger of the pool. No configuration owns a pool, so it writes to the logs of
// the one that serves.
func (l *log) Logger() *zap.Logger {
	log, serving := caddy.Log().Named(string(logs{}.CaddyModule().ID)), caddy.ActiveContext()
	if serving.GetMetricsRegistry() != nil {
		log = serving.Logger(logs{})
	}
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core {
		return zapcore.NewTee(c, emitter{to: l.events})
	})).With(zap.String("pool", l.Name))
}

// events are the names, for Caddy's events app, of what the pool's log says. An event has the fields
// of its log line as its data.
var events = map[string]string{
	"worker is marked down":                                            "kv_router_worker_marked_down",
	"worker is healthy again":                                          "kv_router_worker_healthy",
	"worker is hung, and marked down until it makes progress":          "kv_router_worker_hung",
	"worker makes progress again":                                      "kv_router_worker_progresses",
	"worker is drained: it gets no new requests":                       "kv_router_worker_drained",
	"worker is no longer drained":                                      "kv_router_worker_undrained",
	"worker lost its KV cache, and the router cleared its cache model": "kv_router_worker_lost_cache",
	"another router is silent, and its requests do not count any more": "kv_router_router_silent",
	"condition begins":                                                 "kv_router_condition_begins",
	"condition is over":                                                "kv_router_condition_ends",
}

// mostEvents bounds the events that wait for a slow handler. Further ones are dropped.
const mostEvents = 256

// event waits to be emitted.
type event struct {
	name string
	data map[string]any
}

// emitter is a core of the pool's log that queues events.
type emitter struct {
	fields []zapcore.Field
	to     chan<- event
}

// Enabled implements zapcore.LevelEnabler. No event comes from a line that is not logged by default.
func (emitter) Enabled(l zapcore.Level) bool { return l >= zapcore.InfoLevel }

func (m emitter) With(fields []zapcore.Field) zapcore.Core {
	return emitter{append(slices.Clip(m.fields), fields...), m.to}
}

func (m emitter) Check(e zapcore.Entry, to *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if events[e.Message] == "" {
		return to
	}
	return to.AddCore(e, m)
}

// Write implements zapcore.Core. It never waits: the caller may hold a lock.
func (m emitter) Write(e zapcore.Entry, fields []zapcore.Field) error {
	data := zapcore.NewMapObjectEncoder()
	for _, list := range [][]zapcore.Field{m.fields, fields} {
		for _, f := range list {
			f.AddTo(data)
		}
	}
	select {
	case m.to <- event{events[e.Message], data.Fields}:
	default:
	}
	return nil
}

func (emitter) Sync() error { return nil }

// emit emits events until the pool ends, by the configuration that serves then.
func (l *log) emit(life context.Context) {
	for {
		select {
		case <-life.Done():
			return
		case e := <-l.events:
			serving := caddy.ActiveContext()
			if app, err := serving.AppIfConfigured("events"); err == nil {
				if to, ok := app.(*caddyevents.App); ok {
					to.Emit(serving, e.name, e.data)
				}
			}
		}
	}
}
