package resume

import (
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// TestWhoCanGiveTheRest asks engines of several types for the rest of a stream, in each way.
func TestWhoCanGiveTheRest(t *testing.T) {
	set := &pool.Settings{Upstreams: map[string]bool{}, Workers: map[string]worker.Settings{}}
	var ups reverseproxy.UpstreamPool
	for dial, kind := range map[string]string{"v:1": "vllm", "w:1": "vllm", "l:1": "llamacpp", "x:1": "other"} {
		set.Upstreams[dial] = true
		set.Workers[dial] = worker.Settings{Dial: dial, Engine: kind}
		ups = append(ups, &reverseproxy.Upstream{Dial: dial})
	}
	p, err := pool.New("resume", set.WithDefaults(), turn.NewCloser)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Destruct() })
	var tables pool.Tables
	offers, old := tables.Offers(p, ups, nil), p.Worker("v:1")
	for way, cannot := range map[string][]string{
		api.WayWhole: {"v:1"},
		api.WayText:  {"v:1", "x:1"},
		api.WayExact: {"l:1", "v:1", "x:1"},
	} {
		list, reason := Without(offers, old, api.NameChat, way)
		var dials []string
		for _, w := range list {
			dials = append(dials, w.Dial)
		}
		if slices.Sort(dials); !slices.Equal(dials, cannot) || reason != "" {
			t.Errorf("%s: %v cannot, want %v; reason %q", way, dials, cannot, reason)
		}
	}
	alone := tables.Offers(p, reverseproxy.UpstreamPool{{Dial: "v:1"}, {Dial: "x:1"}}, nil)
	if _, reason := Without(alone, old, api.NameChat, api.WayText); reason != NotResumableEngine {
		t.Errorf("no engine: reason %q", reason)
	}
	if _, reason := Without(alone, old, api.NameChat, api.WayExact); reason != NotExact {
		t.Errorf("no engine by ids: reason %q", reason)
	}
	if IsPossible(alone, old, api.NameChat, true) || !IsPossible(offers, old, api.NameChat, false) {
		t.Error("whether a stream may go on")
	}
}

// TestCausesAreThoseOfMetrics sorts why streams break off.
func TestCausesAreThoseOfMetrics(t *testing.T) {
	for err, want := range map[error]string{
		io.ErrUnexpectedEOF: "broken", errors.New("reset"): "broken", response.ErrAborted: "error",
		attempt.ErrDrained: "drain", attempt.ErrFirstToken: "first_token",
	} {
		if got := Cause(err); got != want {
			t.Errorf("%v: %q, want %q", err, got, want)
		}
	}
}
