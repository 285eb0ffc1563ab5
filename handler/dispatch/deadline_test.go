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
		out := d.attempt.watched(r)
		g := d.attempt.watch
		if (g != nil) != v.watched || (out != r) != v.watched {
			t.Errorf("%+v: watched %v", v, g != nil)
		}
		if err := d.attempt.arrived(&http.Response{StatusCode: http.StatusBadRequest}, nil); err != nil {
			t.Error(err)
		}
		d.End()
	}
}
