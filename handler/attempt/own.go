package attempt

import (
	"errors"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
)

// Own are requests of the router's own, which make engines compute a prompt. Their answers are read whole.

// Build returns the request of an attempt of the router's own. like is the client's, to any worker.
func (a *Attempt) Build(like *http.Request) *http.Request {
	c := a.Call
	r := Request{Plan: c.Plan, Body: c.Body, Worker: a.Worker, Target: a.Target, Phase: a.Phase, Shared: true}
	out := *c.Trace.Carry(r.Build(like))
	u := *out.URL // the transport changes it
	out.URL = &u
	return &out
}

// ErrUnread means that the answer to a request of the router's own is no answer, or too long.
var ErrUnread = errors.New("the answer is an error, or cannot be read")

// Read sends the request and reads the answer, which has at most so many bytes. The status is 0 without an
// answer.
func (a *Attempt) Read(req *http.Request, send Sender, most int64) (status int, data []byte, answer *api.Answer, err error) {
	resp, err := send(req)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	response.Unpack(resp)
	data, err = upstream.ReadAll(resp.Body, most)
	tooLong := errors.Is(err, upstream.ErrTooLong)
	switch {
	case err != nil && !tooLong:
		return 0, nil, nil, err
	case resp.StatusCode >= http.StatusMultipleChoices:
		return resp.StatusCode, nil, nil, errors.New("status " + resp.Status)
	case tooLong:
		return resp.StatusCode, nil, nil, ErrUnread
	}
	answer = a.Call.Plan.Request.NewAnswer(false)
	answer.Write(data)
	if answer.Finish(); answer.Failed() {
		err = ErrUnread
	}
	return resp.StatusCode, data, answer, err
}
