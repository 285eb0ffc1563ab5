package dispatch

import (
	"context"
	"io"
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/tidwall/gjson"
)

// bindOpened binds the session that a client has opened in the engine itself. The answer has its
// id.
func (d *Dispatch) bindOpened(ctx context.Context, resp *http.Response) {
	a, p := d.attempt, d.plan
	if p.Opened == nil || resp.StatusCode != http.StatusOK || body.Compressed(resp.Header) {
		return
	}
	const most = 16 << 10
	begin, err := io.ReadAll(io.LimitReader(resp.Body, most))
	resp.Body = &response.Replayed{ReadCloser: resp.Body, Begin: begin, Err: err}
	if id := gjson.ParseBytes(begin); id.Type == gjson.String && id.Str != "" {
		s := p.Opened(id.Str)
		d.turn.Opened(ctx, &s, a.Target)
	}
	if !p.Session.Key.IsZero() { // the engine may have got the client's id with its tenant's
		d.turn.Opened(ctx, &p.Session, a.Target)
	}
}

// commit binds the session to the target of a good answer. It counts what became of the session,
// and says it in the response headers.
func (d *Dispatch) commit(ctx context.Context, resp *http.Response) {
	a := d.attempt
	home, _ := d.turn.Home()
	good := resp.StatusCode < 300
	d.bindOpened(ctx, resp)
	state := d.turn.Commit(ctx, a.Target, good)
	if good && d.turn.EngineSession() != "" { // opened by this request: no other worker may serve it from now on
		d.fixed = fixed{worker: a.Worker, rank: nvext.Some(a.Target.Rank), reason: ReasonSession}
	}
	if state == turn.None {
		return
	}
	d.PoolMetrics.turns[state].Inc()
	if state == turn.Moved {
		d.Metrics.moves.WithLabelValues(d.Pool.Name, d.whyMoved(home)).Inc()
	}
	if d.Labels != "" {
		resp.Header.Set(d.Labels+"Session-Source", d.plan.Session.Source)
		resp.Header.Set(d.Labels+"Session-State", string(state))
	}
}

func (d *Dispatch) whyMoved(home kvscore.Target) string {
	w, want := d.offers.Worker(home.Worker), d.Wants()
	switch {
	case w == nil:
		return movedGone
	case w == d.attempt.Worker: // another rank
		return movedCost
	case w.IsShort(want.Prompt, want.Answer), d.beyond > 0 && slices.Contains(d.unfit, w):
		return movedContext
	case slices.Contains(d.tried, w):
		return movedFailed
	case !w.TakesRequests(d.attempt.Begun):
		return movedUnavailable
	}
	return movedCost
}

// keepNamed remembers the ids of what the engine may keep after a request for no known API, such as a
// job. Later requests name it.
func (d *Dispatch) keepNamed(resp *http.Response) {
	a, path := d.attempt, d.plan.HTTP.URL.Path
	if !d.plan.Makes() || resp.StatusCode >= 300 || !body.IsJSON(body.MediaType(resp.Header)) || body.Compressed(resp.Header) {
		return
	}
	const most = 64 << 10
	response.Watch(resp, most, func(begin []byte) {
		rawjson.Texts(begin, 4, func(name, id string) bool {
			if id = engine.Kept(path, name, id); id != "" && len(id) <= 512 {
				d.turn.KeepNamed(id, a.Target)
			}
			return true
		})
	})
}
