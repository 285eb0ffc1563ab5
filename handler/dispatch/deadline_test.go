package dispatch

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
)

// TestOnlyStreamsThatCanMoveAreWatched asks for the watch of each kind of request.
func TestOnlyStreamsThatCanMoveAreWatched(t *testing.T) {
	for _, v := range []struct {
		workers []string
		stream  bool
		watched bool
	}{
		{[]string{"a:1"}, true, false}, // where else?
		{[]string{"a:1", "b:1"}, true, true},
		{[]string{"a:1", "b:1"}, false, false},
	} {
		h := testHandler(t, v.workers...)
		d, _ := plannedDispatch(t, h, 10)
		d.plan.Request.Stream = v.stream
		d.Select(context.Background(), h.ReverseProxy.Upstreams)
		r := httptest.NewRequest(http.MethodPost, "/", http.NoBody)
		h.dispatcher.Transport = answers(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusBadRequest, Header: make(http.Header), Body: http.NoBody}, nil
		})
		if _, _, err := d.send(r); err != nil {
			t.Error(err)
		}
		if watched := d.attempt.Context() != nil; watched != v.watched {
			t.Errorf("%+v: watched %v", v, watched)
		}
		d.End()
	}
}

// answers is a transport to workers that a test makes up.
type answers func(*http.Request) (*http.Response, error)

func (f answers) Send(req *http.Request) (*http.Response, error)      { return f(req) }
func (f answers) SendFresh(req *http.Request) (*http.Response, error) { return f(req) }
