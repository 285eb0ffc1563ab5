package nvext

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Needs returns the kinds that a request uses, and none for harmless fields.
func TestNeeds(t *testing.T) {
	for raw, want := range map[string]Grants{
		`{}`: 0, `{"cache_salt":"s","agent_hints":{"osl":5},"annotations":["request_id"],"session_control":{"session_id":"s"}}`: 0,
		`{"dp_rank":4294967295}`:                              0,
		`{"dp_rank":0}`:                                       Pins,
		`{"agent_hints":{"priority":0}}`:                      Priorities,
		`{"cache_control":{}}`:                                Priorities,
		`{"allowed_worker_ids":[]}`:                           Overrides,
		`{"metadata_upload":{"url":"u"}}`:                     Uploads,
		`{"annotations":["query_instance_id:explain"]}`:       Explain,
		`{"annotations":["payload_usage"]}`:                   Explain,
		`{"extra_fields":["timing"],"backend_instance_id":1}`: Explain | Pins,
	} {
		ext, err := Parse([]byte(raw), MaxTTL)
		if err != nil || ext.Needs() != want {
			t.Errorf("%s needs %v, want %v; error %v", raw, ext.Needs(), want, err)
		}
	}
	for word, explains := range map[string]bool{"query_instance_id": false, "query_instance_id:x": false, "query_instance_id:explain": true, "query_instance_id:explained": false} {
		ext, err := Parse([]byte(`{"annotations":["`+word+`"]}`), MaxTTL)
		if err != nil || !ext.QueryOnly() || ext.QueryExplains() != explains {
			t.Errorf("%s: only %v, explains %v, error %v", word, ext.QueryOnly(), ext.QueryExplains(), err)
		}
	}
}

// Each kind drops its own fields and no other.
func TestRestrict(t *testing.T) {
	parse := func() Ext {
		ext, err := Parse([]byte(every), MaxTTL)
		if err != nil {
			t.Fatal(err)
		}
		ext.Tenant = "t"
		return ext
	}
	for n, name := range GrantNames() {
		g, ok := ParseGrant(name)
		if !ok || g != 1<<n || g.String() != name {
			t.Fatalf("%s: %v, %v", name, g, ok)
		}
		want, got := parse(), parse()
		switch g {
		case Pins:
			want.BackendInstanceID, want.PrefillWorkerID, want.DecodeWorkerID = Opt[uint64]{}, Opt[uint64]{}, Opt[uint64]{}
			want.DPRank, want.PrefillDPRank = Opt[uint32]{}, Opt[uint32]{}
		case Priorities:
			want.AgentHints = AgentHints{OSL: want.AgentHints.OSL, SpeculativePrefill: want.AgentHints.SpeculativePrefill}
			want.CacheTTL = Opt[time.Duration]{}
		case Overrides:
			want.Override, want.AllowedWorkerIDs, want.RoutingConstraints = kvscore.Override{}, nil, RoutingConstraints{}
		case Tenants:
			want.Tenant = ""
		case Uploads:
			want.MetadataUpload = ""
		case Explain:
			want.Annotations, want.ExtraFields = annotationsHarmless, 0
		}
		want.Annotations &^= annotationOwned
		dropped := got.Restrict(Everything &^ g)
		if dropped != g|Explain || !reflect.DeepEqual(got, want) {
			t.Errorf("without %v: dropped %v, left %+v\nwant %+v", g, dropped, got, want)
		}
		if dropped = got.Restrict(Everything &^ g); dropped != 0 {
			t.Errorf("without %v a second time: %v", g, dropped)
		}
	}
	none := parse()
	if dropped := none.Restrict(0); dropped != Everything {
		t.Errorf("nothing granted: %v", dropped)
	}
	if none.CacheSalt != "salt" || none.SessionControl.SessionID != "s" || none.CacheTTL.Set || !none.AgentHints.OSL.Set || none.TokenCount != 3 {
		t.Errorf("what needs no trust is gone: %+v", none)
	}
	var nothing Ext
	if dropped := nothing.Restrict(0); dropped != 0 {
		t.Errorf("of nothing: %v", dropped)
	}
	if _, ok := ParseGrant("all"); ok || Grants(0).String() != "" {
		t.Error("invalid names are accepted")
	}
}

func TestApplyHeaders(t *testing.T) {
	body := Ext{
		BackendInstanceID: Some[uint64](9), DecodeWorkerID: Some[uint64](8), PrefillWorkerID: Some[uint64](7), DPRank: Some[uint32](6), PrefillDPRank: Some[uint32](5),
		AgentHints: AgentHints{Priority: Some[int32](4), StrictPriority: Some[uint32](3), OSL: Some[uint32](99)}, CacheSalt: "b",
	}
	worker := func(n uint64) func(e *Ext) {
		return func(e *Ext) { e.BackendInstanceID, e.DecodeWorkerID = Some(n), Some(n) }
	}
	for _, c := range []struct {
		headers, malformed string
		change             func(e *Ext)
	}{
		{"", "", nil},
		{"X-Dynamo-Worker-Instance-Id: 123", "", worker(123)},
		{"X-Worker-Instance-Id: 18446744073709551615", "", worker(1<<64 - 1)},
		{"X-Dynamo-Worker-Instance-Id: 1; X-Worker-Instance-Id: 2", "", worker(1)},
		{"X-Dynamo-Worker-Instance-Id: x; X-Worker-Instance-Id: 2", "X-Dynamo-Worker-Instance-Id", nil},
		{"X-Worker-Instance-Id: 18446744073709551616", "X-Worker-Instance-Id", nil},
		{"X-Worker-Instance-Id: -1", "X-Worker-Instance-Id", nil},
		{"X-Worker-Instance-Id: 1.0", "X-Worker-Instance-Id", nil},
		{"X-Worker-Instance-Id:", "X-Worker-Instance-Id", nil},
		{"X-Prefill-Instance-Id: 456", "", func(e *Ext) { e.PrefillWorkerID = Some[uint64](456) }},
		{"X-Dynamo-Prefill-Instance-Id: 457", "", func(e *Ext) { e.PrefillWorkerID = Some[uint64](457) }},
		{"X-Dp-Rank: 3", "", func(e *Ext) { e.DPRank = Some[uint32](3) }},
		{"X-Data-Parallel-Rank: 0", "", func(e *Ext) { e.DPRank = Some[uint32](0) }},
		{"X-Data-Parallel-Rank: 2; X-Dp-Rank: 1", "", func(e *Ext) { e.DPRank = Some[uint32](1) }},
		{"X-Dynamo-Dp-Rank: 4294967295", "", nil},
		{"X-Dynamo-Dp-Rank: 4294967296", "X-Dynamo-Dp-Rank", nil},
		{"X-Dynamo-Prefill-Dp-Rank: 5", "", func(e *Ext) { e.PrefillDPRank = Some[uint32](5) }},
		{"X-Prefill-Dp-Rank: 4294967295", "", nil},
		{"X-Dynamo-Request-Priority: -3", "", func(e *Ext) { e.AgentHints.Priority = Some[int32](-3) }},
		{"X-Dynamo-Request-Priority: 0", "", func(e *Ext) { e.AgentHints.Priority = Some[int32](0) }},
		{"X-Dynamo-Request-Priority: abc", "X-Dynamo-Request-Priority", nil},
		{"X-Dynamo-Request-Strict-Priority: 7", "", func(e *Ext) { e.AgentHints.StrictPriority = Some[uint32](7) }},
		{"X-Dynamo-Request-Strict-Priority: 4294967295", "", func(e *Ext) { e.AgentHints.StrictPriority = Some[uint32](1<<32 - 1) }},
		{"X-Dynamo-Request-Strict-Priority: -1", "X-Dynamo-Request-Strict-Priority", nil},
		{"X-Tenant-Id: t", "", func(e *Ext) { e.Tenant = "t" }},
		{"X-Tenant-Id:", "", nil},
		{"X-Tenant-Id: " + strings.Repeat("t", MaxText+1), "", func(e *Ext) {
			e.Tenant = fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(strings.Repeat("t", MaxText+1))))
		}},
		{"X-Tenant-Id: t; X-Dp-Rank: x; X-Worker-Instance-Id: 5; X-Dynamo-Request-Priority: y", "X-Dp-Rank X-Dynamo-Request-Priority", func(e *Ext) {
			worker(5)(e)
			e.Tenant = "t"
		}},
	} {
		h := http.Header{}
		for line := range strings.SplitSeq(c.headers, ";") {
			name, value, _ := strings.Cut(line, ":")
			if name = strings.TrimSpace(name); name != "" {
				h.Set(name, value)
			}
		}
		for _, e := range []Ext{{}, body} {
			want := e
			if c.change != nil {
				c.change(&want)
			}
			malformed := e.ApplyHeaders(func(name string) (string, bool) {
				v := h[name]
				if len(v) == 0 {
					return "", false
				}
				return v[0], true
			})
			if strings.Join(malformed, " ") != c.malformed || !reflect.DeepEqual(e, want) {
				t.Errorf("%.80s: %+v, malformed %v\nwant %+v", c.headers, e, malformed, want)
			}
		}
	}
}

// TestHeaderNeeds has headers that need grants, and similar ones that do not.
func TestHeaderNeeds(t *testing.T) {
	for name, want := range map[string]Grants{
		"X-Dynamo-Meta-Policy-Class": Priorities, "X-Dynamo-Meta-Anything": Priorities,
		"X-Override-Priority": Pins, "X-Override-Rid": Pins, "X-Override-": Pins,
		"X-Dynamo-Session-Id": 0, "X-Dynamo-Session-Final": 0,
		"X-Session-Id": 0, "Authorization": 0, "X-Worker-Instance-Ids": 0, "Dynamo": 0, "X-": 0, "": 0,
	} {
		if got := HeaderNeeds(name); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}
