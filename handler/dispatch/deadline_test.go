package dispatch

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
)

// TestOnlyProbesAreGuardedOfWhatIsSilent asks for the guard of each kind of
// request, of workers that hang and others.
func TestOnlyProbesAreGuardedOfWhatIsSilent(t *testing.T) {
	for _, v := range []struct {
		workers []string
		stream  bool
		hangs   bool
		guarded bool
		limited bool
	}{
		{[]string{"a:1"}, true, false, false, false},
		{[]string{"a:1"}, true, true, false, false}, // where else?
		{[]string{"a:1", "b:1"}, true, false, true, false},
		{[]string{"a:1", "b:1"}, true, true, true, true},
		{[]string{"a:1", "b:1"}, false, false, false, false},
		{[]string{"a:1", "b:1"}, false, true, true, true},
	} {
		h := testHandler(t, v.workers...)
		rt, _ := plannedRoute(t, h, 10)
		rt.plan.Request.Stream = v.stream
		rt.Select(context.Background(), h.ReverseProxy.Upstreams)
		if v.hangs {
			rt.attempt.Worker.Progress.HungSince.Store(1)
		}
		r := httptest.NewRequest(http.MethodPost, "/", http.NoBody)
		out := rt.guarded(r)
		g := rt.attempt.guard
		if (g != nil) != v.guarded || (out != r) != v.guarded || g != nil && (g.first != nil) != v.limited {
			t.Errorf("%+v: guarded %v", v, g != nil)
		}
		if err := rt.arrived(&http.Response{StatusCode: http.StatusBadRequest}, nil); err != nil {
			t.Error(err)
		}
		rt.End()
	}
}
