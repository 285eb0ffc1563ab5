package dispatch

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestPanicWhileBookingLeavesNothing lets a speculative prefill panic when the attempt that is
// just being booked takes its place.
func TestPanicWhileBookingLeavesNothing(t *testing.T) {
	h := testHandler(t, "a:1")
	w := setLimits(h, 2)[0]
	done, ok := h.pool.Background(w, func() { panic("of a prefill") })
	if !ok {
		t.Fatal("the pool takes no background request")
	}
	defer done()
	d, _ := plannedDispatch(t, h, 10)
	func() {
		defer func() { _ = recover() }()
		defer d.End()
		d.Select(t.Context(), h.ReverseProxy.Upstreams)
		t.Error("nothing panicked")
	}()
	if s := h.pool.Scheduler.Stats(); s.Leases != 0 {
		t.Errorf("%d leases are left", s.Leases)
	}
	if n := w.Slots.Running.Load(); n != 0 {
		t.Errorf("%d slots are taken", n)
	}
}

// TestSilentTunnelExpires switches protocols. The lease lives on signs of life, as any other.
func TestSilentTunnelExpires(t *testing.T) {
	h := testHandler(t, "a:1")
	h.adopt()
	d, _ := plannedDispatch(t, h, 10)
	defer d.End()
	if d.Select(t.Context(), h.ReverseProxy.Upstreams) == nil {
		t.Fatal("no worker")
	}
	here, there := net.Pipe()
	defer here.Close()
	resp := d.deliver(httptest.NewRequest(http.MethodGet, "/", http.NoBody), &http.Response{
		StatusCode: http.StatusSwitchingProtocols, Header: make(http.Header), Body: there,
	})
	begun := time.Now()
	time.Sleep(20 * time.Millisecond)
	go here.Write([]byte("word"))
	if _, err := io.ReadFull(resp.Body, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	if n := h.pool.Scheduler.Expire(begun.Add(kvscore.DefaultLeaseExpiry + 10*time.Millisecond)); n != 0 {
		t.Error("bytes are no sign of life")
	}
	if n := h.pool.Scheduler.Expire(time.Now().Add(kvscore.DefaultLeaseExpiry)); n != 1 {
		t.Errorf("%d leases of a silent connection expired, want 1", n)
	}
	if _, ok := resp.Body.(io.Writer); !ok {
		t.Error("the proxy cannot write to the connection")
	}
}
