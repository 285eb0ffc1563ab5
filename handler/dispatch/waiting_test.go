package dispatch

import (
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// setLimits sets the limits of a handler's workers, in their order.
func setLimits(h *harness, limits ...int) []*worker.Worker {
	var workers []*worker.Worker
	for i, up := range h.ReverseProxy.Upstreams {
		h.settings.Upstreams[up.Dial] = true
		h.settings.Workers[up.Dial] = worker.Settings{Dial: up.Dial, MaxRunning: worker.RequestLimit(limits[i])}
		workers = append(workers, h.pool.Worker(up.Dial))
	}
	h.adopt()
	return workers
}

func running(w *worker.Worker) int64 {
	n, _ := w.Running()
	return n
}

// TestLateRequestsGetAnotherRound has a request fail at both workers, and its target pass. In the next round
// over the workers, it is served all the same.
func TestLateRequestsGetAnotherRound(t *testing.T) {
	h := testHandler(t, "a:1", "b:1")
	class := &queue.Class{Name: "chat", TTFT: time.Hour, Late: queue.Refuse}
	for range 20 {
		h.pool.Promises.Compare("chat", time.Hour, time.Hour, time.Hour, time.Now())
	}
	d, _ := plannedDispatch(t, h, 10)
	d.Limits = Limits{Retries: 3, Interval: time.Millisecond}
	d.plan.Class, d.plan.TTFT = class, time.Hour
	d.see(h.ReverseProxy.Upstreams)
	for i := range 4 {
		if err := d.next(t.Context(), nil); err != nil {
			t.Fatalf("attempt %d: %v", i, err)
		}
		d.endAttempt(false)
		d.plan.TTFT = time.Nanosecond
	}
	d.End()
}

// TestFullQueueRejectsNoHeldAnswer fills the queue. A request with a held answer gets that,
// so it must not count as rejected.
func TestFullQueueRejectsNoHeldAnswer(t *testing.T) {
	h := testHandler(t, "a:1", "b:1")
	ups := h.ReverseProxy.Upstreams
	workers := setLimits(h, 1, 1)
	for _, w := range workers {
		h.pool.SeatAt(w, w.Target(0), &kvscore.Request{}, new(pool.Seat))
	}
	full := *h.pool.Settings.Load()
	full.MaxWaiting = 0
	h.pool.Settings.Store(&full)
	for reason, class := range map[string]*queue.Class{turnedAwayFull: nil, turnedAwayBackground: {Name: "batch", Background: true}, "": nil} {
		d, _ := plannedDispatch(t, h, 10)
		d.see(ups)
		held := reason == ""
		counted := func() map[string]float64 {
			n := make(map[string]float64)
			for _, why := range []string{turnedAwayFull, turnedAwayBackground, turnedAwayTimeout, turnedAwayLate} {
				n[why] = testutil.ToFloat64(rejectedTotal.WithLabelValues("test", why))
			}
			return n
		}
		want := counted()
		d.plan.Class = class
		if held {
			d.held = heldAnswer{
				&http.Response{StatusCode: http.StatusServiceUnavailable, Header: http.Header{}, Body: http.NoBody},
				newTestTry(d, workers[0]),
			}
			d.tried = append(d.tried, workers[0])
		}
		if err := d.next(t.Context(), nil); err == nil {
			t.Errorf("held %v: there is a seat", held)
		}
		if rejected := d.wait.turnedAway != nil; rejected == held {
			t.Errorf("held %v: rejected %v", held, rejected)
		}
		if !held {
			want[reason]++
		}
		if got := counted(); !maps.Equal(got, want) {
			t.Errorf("refused for %q: counted %v, want %v", reason, got, want)
		}
		if resp, err := d.giveUp(pool.ErrNoWorker); (resp != nil) != held || (err == nil) != held {
			t.Errorf("held %v: an answer %v, error %v", held, resp != nil, err)
		}
		if r := d.End(); (r.Code != "") == held {
			t.Errorf("held %v: the report says rejected %v", held, r.Code)
		}
	}
}

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
