package endpointslices

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

const (
	// relistEvery is the time between two full lists. A watch can stop to report changes without an
	// error, for instance behind a load balancer. A list puts that right.
	relistEvery = time.Minute
	// listTimeout is how long the API server may take for a list.
	listTimeout = 15 * time.Second
	// firstWait is how long requests wait for the first list.
	firstWait = 3 * time.Second
	// leastPause is the least time between two lists. After failures it doubles, up to mostPause.
	leastPause, mostPause = time.Second, 15 * time.Second
)

// watcher follows the EndpointSlices of a Service: it lists them, and watches them from there until
// the next list is due. It remembers no version, so a watch that breaks, or whose version is gone,
// only makes the next list come early.
type watcher struct {
	target target
	relist time.Duration // between two full lists
	pause  time.Duration // at least between two lists
	logger func() *zap.Logger
	end    context.CancelFunc
	ended  chan struct{}

	first      context.Context // ends after the first list or failure, or after firstWait
	waitNoMore context.CancelFunc
	known      atomic.Pointer[[]string] // the addresses of the pods to use; nil before the first list
	version    atomic.Uint64            // grows when known changes
	confirmed  atomic.Int64             // when the API server last reported pods, Unix nanoseconds
	failures   atomic.Int64
	failure    atomic.Pointer[string] // nil while the router follows the Service

	// the goroutine of run alone uses these
	bySlice      map[string]slice
	status       int    // of failure, see statusOf
	loggedReason string // why no endpoint can be used, as logged
}

func newWatcher(t target, relist, pause time.Duration, logger func() *zap.Logger) *watcher {
	w := &watcher{
		target: t, relist: relist, pause: pause, logger: logger, ended: make(chan struct{}),
	}
	ctx, end := context.WithCancel(context.Background())
	w.end = end
	w.first, w.waitNoMore = context.WithTimeout(context.Background(), firstWait)
	go w.run(ctx)
	return w
}

// Destruct ends the watcher. Requests that are under way still use what it knows.
func (w *watcher) Destruct() error {
	w.end()
	<-w.ended
	return nil
}

// dials returns the addresses of the pods to use. Nobody may change the list.
func (w *watcher) dials(ctx context.Context) ([]string, error) {
	select {
	case <-w.first.Done():
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if dials := w.known.Load(); dials != nil {
		return *dials, nil
	}
	why := "the API server has not answered yet"
	if failure := w.failure.Load(); failure != nil {
		why = *failure
	}
	return nil, fmt.Errorf("the pods of Kubernetes service %s are unknown: %s", w.target, why)
}

func (w *watcher) run(ctx context.Context) {
	defer close(w.ended)
	for pause := w.pause; ctx.Err() == nil; {
		began := time.Now()
		err := w.follow(ctx)
		wait := w.pause - time.Since(began)
		if err != nil && ctx.Err() == nil {
			w.failed(err)
			wait = pause/2 + rand.N(pause/2) //nolint:gosec // spreads the calls of routers
			pause = min(2*pause, mostPause)
		} else {
			pause = w.pause
		}
		w.waitNoMore()
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// follow lists the slices, and applies their changes until the watch ends: because the next list is
// due, its version is gone, or it breaks. An error says that the API server refused a call.
func (w *watcher) follow(ctx context.Context) error {
	c, err := newClient(w.target)
	if err != nil {
		return err
	}
	defer c.CloseIdleConnections()
	version, err := w.list(ctx, c)
	if err != nil {
		return err
	}
	w.waitNoMore()
	ctx, cancel := context.WithTimeout(ctx, w.relist+w.pause) // the API server ends the watch before
	defer cancel()
	changes, err := c.call(ctx, "watch", url.Values{
		"watch": {"true"}, "resourceVersion": {version}, "timeoutSeconds": {strconv.Itoa(int(w.relist / time.Second))},
	})
	switch {
	case statusOf(err) == http.StatusGone:
		return nil
	case err != nil:
		return err
	}
	w.recovered()
	defer changes.Close()
	readEvents(changes, w.target.port, func(name string, s *slice) {
		w.confirmed.Store(time.Now().UnixNano())
		switch {
		case name == "": // nothing changed
			return
		case s == nil:
			delete(w.bySlice, name)
		default:
			w.bySlice[name] = *s
		}
		w.publish()
	})
	return nil
}

func (w *watcher) list(ctx context.Context, c *client) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	body, err := c.call(ctx, "list", nil)
	if err != nil {
		return "", err
	}
	defer body.Close()
	version, bySlice, err := readList(body, w.target.port)
	if err != nil {
		return "", fmt.Errorf("reading the list of endpointslices: %w", err)
	}
	w.bySlice = bySlice
	w.confirmed.Store(time.Now().UnixNano())
	w.publish()
	return version, nil
}

// publish makes what the slices say known to requests. It logs once why there is no pod to use, unless
// the Service has none.
func (w *watcher) publish() {
	dials := merge(w.bySlice)
	if was := w.known.Load(); was == nil || !slices.Equal(*was, dials) {
		w.known.Store(&dials)
		w.version.Add(1)
	}
	why := ""
	if len(w.bySlice) == 0 {
		why = "it has no endpointslices; does the Service exist, and does it select pods?"
	}
	for _, s := range w.bySlice {
		if s.unusable != nil {
			why = max(why, s.unusable.Error()) // the same one each time
		}
	}
	if why != "" && why != w.loggedReason {
		w.logger().Warn("endpoints of a Kubernetes service cannot be used", zap.String("reason", why))
	}
	w.loggedReason = why
}

// failed records a failure. The log gets one line for each status of failures in a row.
func (w *watcher) failed(err error) {
	w.failures.Add(1)
	text := err.Error()
	if status := statusOf(err); w.failure.Swap(&text) == nil || w.status != status {
		w.status = status
		w.logger().Warn("the router cannot follow a Kubernetes service, and uses the last known pods", zap.Error(err))
	}
}

func (w *watcher) recovered() {
	if w.failure.Swap(nil) != nil {
		w.logger().Info("the router follows the Kubernetes service again")
	}
}
