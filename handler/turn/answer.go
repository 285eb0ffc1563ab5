package turn

import (
	"io"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/tidwall/gjson"
)

// BindOpened binds the session that the client has opened itself in the engine of a target. The answer has its
// id. The session's turns and its close go there, and nowhere else while the worker exists.
func (t *Turn) BindOpened(resp *http.Response, at kvscore.Target) {
	p := t.plan
	if p.Opened == nil || resp.StatusCode != http.StatusOK || body.Compressed(resp.Header) {
		return
	}
	const most = 16 << 10
	begin, err := io.ReadAll(io.LimitReader(resp.Body, most))
	resp.Body = &response.Replayed{ReadCloser: resp.Body, Begin: begin, Err: err}
	if id := gjson.ParseBytes(begin); id.Type == gjson.String && id.Str != "" {
		s := p.Opened(id.Str)
		t.fix(&s, at)
	}
	if !p.Session.Key.IsZero() { // the engine may have got the client's id with its tenant's
		t.fix(&p.Session, at)
	}
}

func (t *Turn) fix(s *plan.Session, at kvscore.Target) {
	old := t.peek(s.Key)
	_, _, err := t.Pool.Sessions.Bind(s.Key, old.Version, affinity.Want{
		Target: at, TTL: t.ttl(), Scope: s.Scope, Kind: affinity.Fixed,
	})
	if err != nil {
		t.Failed()
	}
}

// KeepNamed remembers at which target the engine keeps what it may have made for a request for no known API, such
// as a job. Later requests name its id, which the answer has. It is no model's name.
func (t *Turn) KeepNamed(resp *http.Response, at kvscore.Target) {
	if !t.plan.Makes() || resp.StatusCode >= 300 || !body.IsJSON(body.MediaType(resp.Header)) || body.Compressed(resp.Header) {
		return
	}
	const most = 64 << 10
	response.Watch(resp, most, func(begin []byte) {
		rawjson.Texts(begin, 4, func(name, id string) bool {
			id = engine.Kept(t.plan.HTTP.URL.Path, name, id)
			if id != "" && len(id) <= 512 && !t.Pool.Lists(id) {
				t.Pool.Responses.Keep(id, at, affinity.Identity{})
			}
			return true
		})
	})
}
