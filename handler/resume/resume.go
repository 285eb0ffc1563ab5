// Package resume is how a stream that breaks off goes on at another worker. It says which workers can
// give the rest, and how the rest is asked for. Package api says what the client has, and makes one stream
// of both parts. The package makes no attempt.
package resume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// Config configures what becomes of a stream whose engine dies, is cut off, stalls, hangs, or is
// drained with `move`. The stream goes on at another worker, and its client sees one stream.
type Config struct {
	// Whether streams go on elsewhere: `on`, `exact` or `off`. With `off`, a broken stream ends with
	// an error event. With `exact`, chats and completions of vLLM also go on within reasoning and
	// tool calls, token by token. vLLM needs --enable-scale-out for that, and returns the ids of
	// all answers' tokens. Default: `on`.
	Mode string `json:"mode,omitempty"`

	// How many tokens of an answer the router keeps for that, at about 8 bytes each. A stream
	// with more stays with its worker. Default: 32768.
	Tokens int `json:"tokens,omitempty"`

	// How often one stream may go on elsewhere. Default: 2.
	Tries int `json:"tries,omitempty"`
}

// Complete checks the configuration and fills in what it leaves out.
func (r *Config) Complete() error {
	r.Mode, r.Tokens, r.Tries = cmp.Or(r.Mode, on), cmp.Or(r.Tokens, 32768), cmp.Or(r.Tries, 2)
	switch {
	case !slices.Contains(Modes, r.Mode):
		return fmt.Errorf("resume: must be on, exact or off, got %q", r.Mode)
	case r.Tokens < 0 || r.Tokens > mostTokens:
		return fmt.Errorf("resume tokens: must be from 1 to %d, got %d", mostTokens, r.Tokens)
	case r.Tries < 0:
		return fmt.Errorf("resume tries: must be positive, got %d", r.Tries)
	}
	return nil
}

const (
	on, exact, off = "on", "exact", "off"
	mostTokens     = 1 << 24
)

// Modes are the values of Config.Mode.
var Modes = []string{on, exact, off}

// IsOff returns whether no stream goes on elsewhere.
func (r *Config) IsOff() bool { return r.Mode == off }

// IsExact returns whether streams also go on by the ids of their tokens.
func (r *Config) IsExact() bool { return r.Mode == exact }

// Reasons why a stream cannot go on elsewhere, beside those of package api.
const (
	NotResumableBudget   = "budget"    // the retry budget had no room in time
	NotResumableEngine   = "engine"    // no other engine can continue an answer
	NotResumableNoWorker = "no_worker" // no other worker took it
	NotResumableTries    = "tries"     // it has moved too often, or may be what ends engines

	NotExact = "not exact" // no engine goes on by ids; another way may do
)

// Cause returns the cause of a move, as metrics name it.
func Cause(err error) string {
	if ended, ok := errors.AsType[*attempt.EndedError](err); ok {
		return ended.Reason
	}
	if errors.Is(err, response.ErrEvent) {
		return "error" // the engine sent an error event
	}
	return "broken" // the connection broke, or the stream ended early
}

// gives returns whether an engine can give the rest of an answer of an API in one way.
func gives(e *engine.Engine, name, way string) bool {
	switch way {
	case api.WayWhole:
		return true
	case api.WayExact:
		return e.ReturnsIDs(name)
	}
	return e.Continues(name)
}

// IsPossible returns whether another worker than the present one can continue a stream that has begun.
func IsPossible(o pool.Offers, now *worker.Worker, name string, byIDs bool) bool {
	return slices.ContainsFunc(o.Table.Rows, func(r pool.TableRow) bool {
		e := r.Worker.Engine()
		return r.Worker != now && (gives(e, name, api.WayText) || byIDs && gives(e, name, api.WayExact))
	})
}

// Without returns the workers that cannot give the rest: the old one, unless it is nil, and those whose
// engines cannot. If there are no others, it returns the reason.
func Without(o pool.Offers, old *worker.Worker, name, way string) (list []*worker.Worker, reason string) {
	if old != nil {
		list = append(list, old)
	}
	if reason = NotResumableEngine; way == api.WayExact {
		reason = NotExact
	}
	for i := range o.Table.Rows {
		w := o.Table.Rows[i].Worker
		e := w.Engine()
		switch {
		case w == old:
		case gives(e, name, way):
			reason = ""
		default:
			list = append(list, w)
		}
	}
	return list, reason
}

// countTimeout bounds the question for the number of tokens, and countBytes its answer.
const (
	countTimeout = 2 * time.Second
	countBytes   = 8 << 20
)

// CountTokens asks the engine how many tokens the text so far has, unless the first one has said so. A
// replacement character stands for a token that was no character, and has more tokens than that.
func CountTokens(
	ctx context.Context, rest *api.Rest, model string, w *worker.Worker, ask func(ctx context.Context, most int64) engine.Post,
) {
	if rest.Exact || strings.Contains(rest.Text, "\ufffd") {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	e := w.Engine()
	if n, ok := e.CountText(model, rest.Text, ask(ctx, countBytes)); ok {
		rest.Tokens, rest.Exact = n, true
	}
}
