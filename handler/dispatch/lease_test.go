package dispatch

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// panics is a log core that panics.
type panics struct{ zapcore.Core }

func (panics) Enabled(zapcore.Level) bool { panic("of a log") }

// TestPanicWhileBookingLeavesNothing panics while an attempt is being booked.
func TestPanicWhileBookingLeavesNothing(t *testing.T) {
	h := testHandler(t, "a:1")
	w := setLimits(h, 2)[0]
	d, _ := plannedDispatch(t, h, 10)
	d.Logger = zap.New(panics{zapcore.NewNopCore()})
	func() {
		defer func() { _ = recover() }()
		defer d.End()
		d.Select(t.Context(), h.ReverseProxy.Upstreams)
		t.Error("nothing panicked")
	}()
	if s := h.pool.Scheduler.Stats(); s.Leases != 0 {
		t.Errorf("%d leases are left", s.Leases)
	}
	if n := running(w); n != 0 {
		t.Errorf("%d slots are taken", n)
	}
}

// TestSilentTunnelIsNoLeak switches protocols. The lease of an open connection never
// expires, and ends with the request.
func TestSilentTunnelIsNoLeak(t *testing.T) {
	h := testHandler(t, "a:1")
	h.adopt()
	d, _ := plannedDispatch(t, h, 10)
	if d.Select(t.Context(), h.ReverseProxy.Upstreams) == nil {
		t.Fatal("no worker")
	}
	here, there := net.Pipe()
	defer here.Close()
	resp := d.deliver(httptest.NewRequest(http.MethodGet, "/", http.NoBody), &http.Response{
		StatusCode: http.StatusSwitchingProtocols, Header: make(http.Header), Body: there,
	})
	if n := h.pool.Scheduler.Expire(time.Now().Add(100 * kvscore.DefaultLeaseExpiry)); n != 0 {
		t.Errorf("%d leases of an open connection expired", n)
	}
	if _, ok := resp.Body.(io.Writer); !ok {
		t.Error("the proxy cannot write to the connection")
	}
	d.End()
	if s := h.pool.Scheduler.Stats(); s.Leases != 0 {
		t.Errorf("%d leases are left", s.Leases)
	}
}
