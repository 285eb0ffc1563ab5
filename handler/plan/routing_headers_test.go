package plan

import (
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

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
			if _, err := nvext.Parse(body, rd.extOptions()); err != nil {
				return
			}
		}
		r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", http.NoBody)
		r.Header = header.Clone()
		p := &Plan{Wishes: Wishes{headers: headersNeed(r.Header)}}
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
