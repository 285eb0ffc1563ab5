package plan

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/texts"
)

// testReader returns a reader that grants every client the same.
func testReader(g nvext.Grants) *Reader {
	return &Reader{
		MaxBody: 1 << 20, Grants: func(*http.Request) nvext.Grants { return g }, Memory: new(body.Memory), Ratios: new(texts.Ratios),
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
			ext, err := nvext.Parse([]byte(`{"session_control":{"session_id":"s","timeout":`+seconds+`}}`), rd.longest())
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

// identified returns the plan of a body.
func identified(t *testing.T, path, body string, ratios *texts.Ratios) *Plan {
	t.Helper()
	opts := api.Options{TextBlock: 64, BlockSize: 16}
	req, err := api.Parse(api.For(path), []byte(body), opts)
	if err != nil {
		t.Fatal(err)
	}
	p := &Plan{Request: req}
	p.identify(opts, ratios, nil)
	return p
}

// TestImagesLeaveTextAlone has one system prompt of 800 tokens, which an engine has
// cached, and another image of 1,500 tokens in nearly each request.
func TestImagesLeaveTextAlone(t *testing.T) {
	system := strings.Repeat("you are a careful inspector of parts, say what you see. ", 57)
	for name, hasImage := range map[string]func(i int) bool{
		"at first none": func(i int) bool { return i > 3 && i%12 != 0 },
		"all":           func(int) bool { return true },
	} {
		t.Run(name, func(t *testing.T) {
			s, targets := kvscore.NewScheduler(kvscore.Settings{}), []kvscore.Target{{Worker: 1}}
			s.Declare(targets[0], 0)
			var ratios texts.Ratios
			var sel kvscore.Selection
			for i := range 24 {
				image, tokens := "", int64(820)
				if hasImage(i) {
					image, tokens = fmt.Sprintf(`,{"type":"image_url","image_url":{"url":"http://images/%d.png"}}`, i), 2320
				}
				p := identified(t, "/v1/chat/completions", fmt.Sprintf(
					`{"messages":[{"role":"system","content":%q},{"role":"user","content":[{"type":"text","text":"part %d"}%s]}]}`, system, i, image), &ratios)
				_, l := s.Select(time.Now(), &p.Score, s.Refs(targets...), 0, nil, &sel)
				if off := sel.Candidates[0].OverlapTokens - 800; i > 1 && (off < -16 || off > 16) {
					t.Errorf("request %d: %d tokens predicted, 800 are cached", i, sel.Candidates[0].OverlapTokens)
				}
				cached := int64(800)
				if i == 0 {
					cached = 0
				}
				l.Counted(kvscore.Counts{Prompt: tokens, Cached: cached})
				l.End(true, nil)
			}
		})
	}
}

// TestGivenIDsReplaceTheText replaces the text of a plan by token ids, as queries do.
func TestGivenIDsReplaceTheText(t *testing.T) {
	var ratios texts.Ratios
	p := identified(t, "/v1/completions", `{"prompt":"`+strings.Repeat("hello world, this is it. ", 200)+`"}`, &ratios)
	ids := "[" + strings.Repeat("1234,5678,91011,17,", 400)
	if p = testReader(0).WithTokens(p, []byte(ids[:len(ids)-1]+"]")); p == nil {
		t.Fatal("the ids are refused")
	}
	s, target := kvscore.NewScheduler(kvscore.Settings{}), kvscore.Target{Worker: 1}
	s.Declare(target, 0)
	var sel kvscore.Selection
	s.Explain(time.Now(), &p.Score, s.Refs(target), 0, &kvscore.LeastLoad{}, &sel)
	if sel.Tokens != 1600 || sel.RequestBlocks != 100 {
		t.Errorf("1600 ids are measured as %d tokens in %v blocks", sel.Tokens, sel.RequestBlocks)
	}
}

// TestEmbeddingsWaitForTheirAnswer: the answer shows when their prefill is over. That of a plain
// chat ends when it is predicted to.
func TestEmbeddingsWaitForTheirAnswer(t *testing.T) {
	text, now := strings.Repeat("hello world, this is it. ", 200), time.Now()
	for path, text := range map[string]string{
		"/v1/embeddings":       `{"input":"` + text + `"}`,
		"/v1/chat/completions": `{"messages":[{"role":"user","content":"` + text + `"}]}`,
	} {
		s, target, sel := kvscore.NewScheduler(kvscore.Settings{}), kvscore.Target{Worker: 1}, kvscore.Selection{}
		s.Declare(target, 0)
		p := identified(t, path, text, new(texts.Ratios))
		s.Select(now, &p.Score, s.Refs(target), 0, &kvscore.LeastLoad{}, &sel)
		if l, _ := s.Load(now.Add(time.Hour), target); (l.PrefillTokens > 0) != (path == "/v1/embeddings") {
			t.Errorf("%s: %d tokens are to be computed after an hour without an answer", path, l.PrefillTokens)
		}
	}
}

func TestClientsTargets(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"250": 250 * time.Millisecond, "1.5": 1500 * time.Microsecond, "2s": 2 * time.Second, "1h": time.Hour,
		"": 0, "0": 0, "-250": 0, "1e999": 0, "0x1p-2": 0, "-2s": 0, "NaN": 0, "inf": 0, "-Inf": 0, "1e300": 0, "3600001": 0, "2h": 0, "0.1": 0, "1us": 0,
		"soon": 0, "9223372036854775807": 0, "250ms, 10ms": 0,
	} {
		if got := parseTarget(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

func TestTenantsNames(t *testing.T) {
	long := strings.Repeat("x", 129)
	switch a, b := TenantOf("acme"), TenantOf("acmf"); {
	case TenantOf("") != Tenant{}, a != TenantOf("acme"), a.Name != "acme", a.Hash == 0, a.Hash == b.Hash:
		t.Errorf("tenants %v and %v", a, b)
	}
	if n := TenantOf(long).Name; n != "sha256:"+nvext.Digest([]byte(long)) {
		t.Errorf("a long name is kept as %q", n)
	}
	if n := TenantOf(long[1:]).Name; n != long[1:] {
		t.Errorf("the longest name is kept as %q", n)
	}
}

// TestTenantIsWhatTheOperatorTrusts has the client's header name the tenant if that is granted. Salts in
// bodies name none: a client can invent as many as it likes.
func TestTenantIsWhatTheOperatorTrusts(t *testing.T) {
	for _, v := range []struct {
		grants nvext.Grants
		want   string
	}{{0, ""}, {nvext.Tenants, "acme"}} {
		rd, r := testReader(v.grants), ordinary()
		r.Header.Set(nvext.HeaderTenant, "acme")
		p, err := rd.Read(r)
		if err != nil || p.Tenant != TenantOf(v.want) {
			t.Errorf("grants %v: tenant %v, want %q; error %v", v.grants, p.Tenant, v.want, err)
		}
	}
	rd, r := testReader(0), ordinary()
	rd.Class = func(*http.Request) (*queue.Class, string) { return &queue.Class{TTFT: time.Second}, "" }
	if p, err := rd.Read(r); err != nil || p.Tenant != (Tenant{}) || p.TTFT != time.Second {
		t.Errorf("tenant %v, target %v, error %v", p.Tenant, p.TTFT, err)
	}
}

// routing are the headers of the protocol and their grants, written down once more.
var routing = map[nvext.Grants]string{
	nvext.Pins: "X-Dynamo-Worker-Instance-Id X-Worker-Instance-Id X-Dynamo-Prefill-Instance-Id X-Prefill-Instance-Id " +
		"X-Dynamo-Dp-Rank X-Dp-Rank X-Data-Parallel-Rank X-Dynamo-Prefill-Dp-Rank X-Prefill-Dp-Rank",
	nvext.Priorities: "X-Dynamo-Request-Priority X-Dynamo-Request-Strict-Priority",
	nvext.Tenants:    "X-Tenant-Id",
}

// needsOf returns the grant that a header needs, 0 for one that is no routing header.
func needsOf(name string) nvext.Grants {
	switch {
	case strings.HasPrefix(name, "X-Dynamo-Meta-"):
		return nvext.Priorities
	case strings.HasPrefix(name, "X-Override-"):
		return nvext.Pins
	}
	for grant, names := range routing {
		if slices.Contains(strings.Fields(names), name) {
			return grant
		}
	}
	return 0
}

// FuzzHeaders sends headers of any kind together with an nvext. Nothing counts without its
// grant, and an engine gets no header without it.
func FuzzHeaders(f *testing.F) {
	for _, lines := range []string{
		"", "X-Worker-Instance-Id: 5", "X-Dynamo-Worker-Instance-Id: x\nX-Worker-Instance-Id: 5", "x-dp-rank: 4294967295\nX-Tenant-Id: t",
		"X-Tenant-Id: a\nX-Tenant-Id: b\nX-Dynamo-Request-Priority: +3\nX-Dynamo-Request-Strict-Priority: -1",
		"X-Dynamo-Meta-Policy-Class: gold\nX-Dynamo-Session-Id: s\nX-Dynamo-Session-Final: true\nConnection: close, X-Tenant-Id",
		"X-Data-Parallel-Rank: 1\nAuthorization: a\nX-Dynamo-Meta-: x\nX-Prefill-Dp-Rank: 18446744073709551616",
		"X-Worker-Instance-Id: 7\nX-Worker-Instance-Id: 7\nX-Dp-Rank: 0_1",
		"X-Dynamo-Meta-Anything: 1\nX-Override-: 1\nX-Session-Id: 1\nX-Worker-Instance-Ids: 1\nDynamo: 1\nX-: 1",
		"X-Tenant-Id: " + strings.Repeat("t", nvext.MaxText+1) + "\nX-Override-Priority: 9\nX-Override-Routed-Dp-Rank: 1\nX-Override-Rid: r",
	} {
		for _, raw := range []string{"", `{"backend_instance_id":1,"decode_worker_id":2,"prefill_worker_id":3,"dp_rank":4,"prefill_dp_rank":5,"agent_hints":{"priority":6,"strict_priority":7}}`} {
			for _, g := range []uint8{0, uint8(nvext.Everything), uint8(nvext.Priorities), uint8(nvext.Pins | nvext.Tenants)} {
				f.Add(lines, raw, g)
			}
		}
	}
	f.Fuzz(func(t *testing.T, lines, raw string, grants uint8) {
		header := http.Header{}
		for line := range strings.SplitSeq(lines, "\n") {
			if name, value, ok := strings.Cut(line, ":"); ok {
				header.Add(strings.TrimSpace(name), strings.TrimSpace(value)) // as the server has them
			}
		}
		g := nvext.Grants(grants) & nvext.Everything
		rd := testReader(g)
		var body []byte
		if raw != "" {
			body = []byte(raw)
			if _, err := nvext.Parse(body, rd.longest()); err != nil {
				return
			}
		}
		r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", http.NoBody)
		r.Header = header.Clone()
		p := &Plan{Hints: Hints{headers: headersNeed(r.Header)}}
		if err := rd.takeExt(r, p, body); err != nil {
			t.Fatalf("%q and %s: %v", lines, raw, err)
		}
		if p.Ext.Needs()&^g != 0 {
			t.Fatalf("%v: %v counts, with %v", header, p.Ext.Needs(), g)
		}
		checkKept(t, header, p.WithoutRouting(r.Header), g)
		if !reflect.DeepEqual(r.Header, header) {
			t.Fatalf("the server's own header became %v", r.Header)
		}
	})
}

// checkKept checks what of the headers goes on to an engine.
func checkKept(t *testing.T, header, kept http.Header, g nvext.Grants) {
	t.Helper()
	for name, values := range header {
		needs := needsOf(name)
		got, there := kept[name]
		switch {
		case needs == nvext.Pins || g&needs != needs:
			if there {
				t.Fatalf("%v: %s passes, with %v", header, name, g)
			}
		case needs != 0 && len(got) != 1, needs == 0 && !slices.Equal(got, values):
			t.Fatalf("%v: %s became %q", header, name, got)
		}
	}
	for name := range kept {
		if _, there := header[name]; !there {
			t.Fatalf("%v: %s is new", header, name)
		}
	}
}

func TestRequestIDs(t *testing.T) {
	for id, kept := range map[string]bool{"": false, "a-1": true, "a b": false, "é": false, "a\n": false, strings.Repeat("a", 129): false} {
		r := &http.Request{Header: http.Header{HeaderRequestID: {id}}}
		if got := requestID(r); got == "" || (got == id) != kept {
			t.Errorf("%q: %q", id, got)
		}
	}
}
