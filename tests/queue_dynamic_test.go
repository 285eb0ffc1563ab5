package tests

import (
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestNewWorkerServesThoseWhoComeLater has a dynamic source name another worker, and
// then only that one, while requests wait. Those keep the worker that they were queued
// for; requests that come later use the new one and wait for nobody.
func TestNewWorkerServesThoseWhoComeLater(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	list(engines[0].Addr())
	s := startCaddy(t, dynamicSite(maxRunning(1)))
	first := hold(engines[0])
	var all []asked
	for range 4 {
		all = append(all, s.startChat(t, "hi"))
	}
	s.wantWaiting(t, 3)
	for _, now := range [][]string{{engines[0].Addr(), engines[1].Addr()}, {engines[1].Addr()}} {
		list(now...)
		if a := s.mustChat(t, ask("later")); a.engine() != "e2" {
			t.Errorf("with %v, a later request was answered by %s", now, a.engine())
		}
	}
	s.wantWaiting(t, 3)
	first.opened(t)
	for i, q := range all {
		if a := q.wait(t); !a.ok() || a.engine() != "e1" {
			t.Errorf("request %d: status %d, error %v, by %q, body %s", i, a.status, a.err, a.engine(), a.body)
		}
	}
	s.slotsFree(t)
}

// TestQueuedRequestsEndWithTheirWorker has the only worker that requests wait for leave
// the dynamic source and die. They get an error at once, and later requests are served.
func TestQueuedRequestsEndWithTheirWorker(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	list(engines[0].Addr())
	s := startCaddy(t, dynamicSite(maxRunning(1)))
	hold(engines[0])
	var all []asked
	for range 4 {
		all = append(all, s.startChat(t, "hi"))
	}
	s.wantWaiting(t, 3)
	list(engines[1].Addr())
	engines[0].Kill()
	for i, q := range all {
		if a := q.wait(t); a.status < 500 {
			t.Errorf("request %d: status %d, by %q, body %s", i, a.status, a.engine(), a.body)
		}
	}
	s.mustChat(t, ask("later"))
	s.wantWaiting(t, 0)
	s.slotsFree(t)
}
