package plan

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// testReader returns a reader that grants every client the same.
func testReader(g nvext.Grants) *Reader {
	return &Reader{
		MaxBody: 1 << 20, Grants: func(*http.Request) nvext.Grants { return g }, Memory: new(body.Memory), Ratios: new(kvscore.Ratios),
		Hashing:     func() api.Options { return api.Options{TextBlock: 64, BlockSize: 16} },
		TakesTokens: func(string) bool { return true }, Transfers: func() bool { return false }, Lists: func(string) bool { return false }, Keeps: func(string) bool { return false }, Canonical: func(model string) string { return model }, OnlyModel: func() string { return "" }, TTL: func() time.Duration { return time.Minute }, Waiting: func() uint64 { return 0 },
	}
}

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

// TestRequestWithoutWishesCostsNothing reads one, and makes nothing of it.
func TestRequestWithoutWishesCostsNothing(t *testing.T) {
	rd, r, p := new(Reader), ordinary(), &Plan{API: api.For("/v1/chat/completions")}
	if n := testing.AllocsPerRun(100, func() {
		if err := rd.extend(r, p, nil); err != nil || p.Ext != &NoExt || p.headers != 0 {
			t.Fatal(err, p)
		}
		_ = p.WithoutRouting(r.Header)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if NoExt.Needs() != 0 || NoExt.Session() != "" {
		t.Error("what most requests say is not nothing any more")
	}
}

// TestTimeoutsHaveTheOperatorsBounds moves what clients ask for into them.
func TestTimeoutsHaveTheOperatorsBounds(t *testing.T) {
	for ttl, want := range map[time.Duration]string{5 * time.Minute: "1h0m0s", 3 * time.Hour: "3h0m0s"} {
		rd := testReader(0)
		rd.TTL = func() time.Duration { return ttl }
		for seconds, want := range map[string]string{"0": "1s", "60": "1m0s", "18446744073709551615": want} {
			ext, err := nvext.Parse([]byte(`{"session_control":{"session_id":"s","timeout":`+seconds+`}}`), rd.extOptions())
			if err != nil || ext.SessionControl.Timeout.String() != want {
				t.Errorf("ttl %s, timeout %s: %v, want %s; error %v", ttl, seconds, ext.SessionControl.Timeout, want, err)
			}
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
