package handler

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// ordinary is a request as clients' libraries send it.
func ordinary() *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", http.NoBody)
	for _, name := range []string{
		"Accept", "Accept-Encoding", "Authorization", "Content-Type", "User-Agent", "X-Stainless-Arch", "X-Stainless-Lang",
		"X-Stainless-Os", "X-Stainless-Package-Version", "X-Stainless-Retry-Count", "X-Stainless-Runtime",
	} {
		r.Header.Set(name, "x")
	}
	return r
}

// BenchmarkExtend is what a request's wishes cost: none, by header, in nvext.
func BenchmarkExtend(b *testing.B) {
	a := api.For("/v1/chat/completions")
	routed := ordinary()
	routed.Header.Set("X-Worker-Instance-Id", "1")
	for _, v := range []struct {
		name string
		r    *http.Request
		raw  []byte
	}{
		{"None", ordinary(), nil},
		{"Header", routed, nil},
		{"Body", ordinary(), []byte(`{"backend_instance_id":1,"agent_hints":{"priority":5,"osl":100},"session_control":{"session_id":"abc"},"cache_salt":"x"}`)},
	} {
		b.Run(v.name, func(b *testing.B) {
			h := benchHandler(b)
			p := new(plan)
			b.ReportAllocs()
			for b.Loop() {
				if err := h.extend(v.r, a, p, v.raw); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestRequestWithoutWishesCostsNothing reads one, and makes nothing of it.
func TestRequestWithoutWishesCostsNothing(t *testing.T) {
	h := &Handler{}
	a, r, p := api.For("/v1/chat/completions"), ordinary(), new(plan)
	if n := testing.AllocsPerRun(100, func() {
		if err := h.extend(r, a, p, nil); err != nil || p.ext != &noExt || p.headers != 0 {
			t.Fatal(err, p)
		}
		_ = p.withoutRouting(r.Header)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if noExt.Needs() != 0 || noExt.Session() != "" {
		t.Error("what most requests say is not nothing any more")
	}
}

// failing is a matcher that cannot tell.
type failing struct{}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (failing) MatchWithError(*http.Request) (bool, error) { return true, fmt.Errorf("no idea") }

// TestMatcherThatFailsGrantsNothing has one that says yes with an error, beside
// lines that hold.
func TestMatcherThatFailsGrantsNothing(t *testing.T) {
	p, err := newPool("trust", new(poolSettings).withDefaults())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Destruct()
	h := &Handler{pool: p, logger: p.logger(), Trust: []*Trust{
		{What: []string{"pins"}, grants: nvext.Pins, matchers: caddyhttp.MatcherSets{{failing{}}}},
		{What: []string{"explain"}, grants: nvext.Explain},
	}}
	if g := h.grants(ordinary()); g != nvext.Explain {
		t.Errorf("granted %v", g)
	}
	if n := len(p.incidents.lasting()); n != 1 {
		t.Errorf("%d conditions last, want 1", n)
	}
	h.Mode = modeDirect
	if g := h.grants(ordinary()); g != nvext.Explain|nvext.Pins {
		t.Errorf("in direct mode granted %v", g)
	}
}

// TestTimeoutsHaveTheOperatorsBounds moves what clients ask for into them.
func TestTimeoutsHaveTheOperatorsBounds(t *testing.T) {
	for ttl, want := range map[time.Duration]string{5 * time.Minute: "1h0m0s", 3 * time.Hour: "3h0m0s"} {
		set := &poolSettings{ttl: ttl}
		h := &Handler{pool: &pool{}}
		h.pool.settings.Store(set.withDefaults())
		for seconds, want := range map[string]string{"0": "1s", "60": "1m0s", "18446744073709551615": want} {
			ext, err := nvext.Parse([]byte(`{"session_control":{"session_id":"s","timeout":`+seconds+`}}`), h.extOptions())
			if err != nil || ext.SessionControl.Timeout.String() != want {
				t.Errorf("ttl %s, timeout %s: %v, want %s; error %v", ttl, seconds, ext.SessionControl.Timeout, want, err)
			}
		}
	}
}

// TestPreference follows Dynamo's rule and its range.
func TestPreference(t *testing.T) {
	for sum, want := range map[float64]string{0: "1.000", 1: "0.467", -1: "2.142", 1e9: "0.368", -1e9: "2.718"} {
		if got := fmt.Sprintf("%.3f", preference(sum)); got != want {
			t.Errorf("taints that weigh %v: %s, want %s", sum, got, want)
		}
	}
}

func TestPriorityOfTheCost(t *testing.T) {
	for _, v := range []struct {
		hints nvext.AgentHints
		want  int
	}{
		{nvext.AgentHints{}, 0},
		{nvext.AgentHints{Priority: nvext.Some(int32(5))}, 5},
		{nvext.AgentHints{Priority: nvext.Some(int32(-5))}, -5},
		{nvext.AgentHints{Priority: nvext.Some(int32(0)), LatencySensitivity: nvext.Some(2.0)}, 0},
		{nvext.AgentHints{LatencySensitivity: nvext.Some(2.0)}, 1},
		{nvext.AgentHints{Priority: nvext.Some(int32(-5)), StrictPriority: nvext.Some(uint32(1))}, 1},
	} {
		if got := priority(&v.hints); got != v.want {
			t.Errorf("%+v: %d, want %d", v.hints, got, v.want)
		}
	}
}
