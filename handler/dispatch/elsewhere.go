package dispatch

import (
	"bytes"
	"io"
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
)

// maxRefusal is how much is looked at of an answer that may say that a worker
// does not serve a model, in bytes.
const maxRefusal = 4 << 10

// servedElsewhere tells whether an answer says that the worker does not serve
// the request's model, and another one that was not tried may: by its list, or
// as nobody knows what it serves. It happens when a worker changes its models,
// and before they were asked for. Nothing was computed then, so that the request
// may be made again whatever it is.
func (rt *Dispatch) servedElsewhere(resp *http.Response) bool {
	a := rt.attempt
	if resp.StatusCode != http.StatusNotFound || rt.plan.Model == "" || rt.plan.Stream != nil || rt.pinned() || body.Compressed(resp.Header) {
		return false
	}
	_, told := a.Worker.Serves(rt.plan.Model)
	found := false
	for i, row := range rt.table(rt.offered).Rows {
		w := row.Worker
		if w == a.Worker || !pool.Available(rt.offered[i]) || slices.Contains(rt.tried, w) || !rt.permits(w) {
			continue
		}
		yes, known := w.Serves(rt.plan.Model)
		found = found || yes || !known && (told || !w.WasProbed())
	}
	if !found {
		return false
	}
	head, err := io.ReadAll(io.LimitReader(resp.Body, maxRefusal))
	resp.Body = &response.Replayed{ReadCloser: resp.Body, Held: head, Err: err}
	return bytes.Contains(bytes.ToLower(head), []byte("model")) // else the path is unknown
}
