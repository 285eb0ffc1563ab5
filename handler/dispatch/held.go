package dispatch

import (
	"io"
	"maps"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/response"
)

// heldAnswer is a worker's answer that calls for a retry. The client gets it if no later attempt
// delivers an answer.
type heldAnswer struct {
	resp    *http.Response
	attempt *attempt
}

// hold keeps an answer back during the retry. It returns what the proxy sees instead: the
// status and header without the body.
func (a *attempt) hold(req *http.Request, resp *http.Response) *http.Response {
	d := a.d
	d.endAttempt(false)
	d.held.drop()
	d.held = heldAnswer{resp: resp, attempt: a}
	shown := *resp
	shown.Header, shown.Body, shown.Request = maps.Clone(resp.Header), http.NoBody, req
	return &shown
}

// takeHeld makes the held answer the client's and returns it; nil if there is none.
func (d *Dispatch) takeHeld() *http.Response {
	h := d.held
	if h.resp == nil {
		return nil
	}
	if d.putsOff() {
		d.held.drop()
		return nil
	}
	d.held = heldAnswer{}
	h.attempt.label(h.resp.Header)
	d.answer = h.attempt.deliveryOf(h.resp)
	return h.resp
}

// writeHeld gives the client the held answer if the proxy has ended without one. It returns
// whether there was one.
func (d *Dispatch) writeHeld(w http.ResponseWriter) bool {
	resp := d.takeHeld()
	if resp == nil {
		return false
	}
	defer resp.Body.Close()
	response.Forward(w.Header(), resp.Header)
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, resp.Body)
	return true
}

// drop drops the answer.
func (h *heldAnswer) drop() {
	if h.resp != nil {
		_ = h.resp.Body.Close()
		*h = heldAnswer{}
	}
}
