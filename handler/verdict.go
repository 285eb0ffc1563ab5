package handler

import (
	"net/http"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"go.uber.org/zap"
)

// promises tells whether an answer of this content type must be legible: a
// stream of events, or JSON. Nor is a page of HTML an answer to an inference
// request. What has another type is what it is.
func promises(h http.Header) bool {
	kind := body.MediaType(h)
	switch kind {
	case typeEvents, "application/json", "text/html":
		return true
	}
	return strings.HasSuffix(kind, "+json")
}

// typeEvents is the media type of a stream of events.
const typeEvents = "text/event-stream"

// judge takes in what an answer that has come whole says of its worker, and
// tells whether anything can be learned from it.
func (o *observer) judge() bool {
	switch {
	case o.promised && !o.reader.Legible():
		o.illegible = true
		o.rt.illegible(o.attempt)
		return false
	case o.reader.Failed() && o.first.IsZero():
		o.rt.erred(o.attempt, "an error as the answer, with a good status", false)
	default:
		if !o.stream {
			_, completion, _ := o.usage()
			if completion > 1 {
				completion = -1 // its time is that of these tokens, and says nothing of the prefill
			}
			o.attempt.lease.Answered(o.headed, completion) // it came with the header
		}
		o.vouch()
	}
	return true
}

// vouch takes in that the worker does what it is there for. A header alone does
// not show that.
func (o *observer) vouch() {
	if !o.vouched {
		o.vouched = true
		o.rt.didWell(o.attempt)
	}
}

// didWell takes in that an attempt came to a good answer.
func (rt *route) didWell(a *attempt) {
	if a.worker.flow.hangs() {
		return // what comes from it shows when it does no more
	}
	if a.worker.health.succeed(now(), a.begun) {
		rt.logger.Info("worker is well again", zap.String("pool", rt.pool.name), zap.String("upstream", a.worker.dial))
	}
}

// illegible takes in that an answer was not what its content type says. Nothing
// is learned from it, nor does it keep the session; one such answer may be
// anybody's fault, but a worker that gives no others is ill.
func (rt *route) illegible(a *attempt) {
	rt.fallBack(fallbackUnreadable)
	rt.erred(a, "not what their content type says", true)
	if rt.seenAt == a.lease.Target() {
		rt.pool.sessions.Remove(rt.session, rt.bound)
	}
}
