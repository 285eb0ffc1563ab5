package nvext

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
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
		{"X-Worker-Instance-Id:", "X-Worker-Instance-Id", nil},
		{"X-Prefill-Instance-Id: 456", "", func(e *Ext) { e.PrefillWorkerID = Some[uint64](456) }},
		{"X-Dynamo-Prefill-Instance-Id: 457", "", func(e *Ext) { e.PrefillWorkerID = Some[uint64](457) }},
		{"X-Dp-Rank: 3", "", func(e *Ext) { e.DPRank = Some[uint32](3) }},
		{"X-Data-Parallel-Rank: 2; X-Dp-Rank: 1", "", func(e *Ext) { e.DPRank = Some[uint32](1) }},
		{"X-Dynamo-Dp-Rank: 4294967295", "", nil},
		{"X-Dynamo-Dp-Rank: 4294967296", "X-Dynamo-Dp-Rank", nil},
		{"X-Dynamo-Prefill-Dp-Rank: 5", "", func(e *Ext) { e.PrefillDPRank = Some[uint32](5) }},
		{"X-Prefill-Dp-Rank: 4294967295", "", nil},
		{"X-Dynamo-Request-Priority: -3", "", func(e *Ext) { e.AgentHints.Priority = Some[int32](-3) }},
		{"X-Dynamo-Request-Priority: abc", "X-Dynamo-Request-Priority", nil},
		{"X-Dynamo-Request-Strict-Priority: 7", "", func(e *Ext) { e.AgentHints.StrictPriority = Some[uint32](7) }},
		{"X-Dynamo-Request-Strict-Priority: 4294967295", "", func(e *Ext) { e.AgentHints.StrictPriority = Some[uint32](1<<32 - 1) }},
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

// cutFor returns an nvext as a Dynamo gets it.
func cutFor(raw []byte, g Grants, noSalt bool) []byte {
	i := rawjson.SkipSpace(raw, 0)
	if i == len(raw) || raw[i] != '{' {
		return raw
	}
	e := rawjson.EditAt(raw, i, math.MaxInt)
	Cut(e, g, noSalt)
	return e.Apply()
}

func TestCut(t *testing.T) {
	const all, none = Everything, Grants(0)
	for _, c := range []struct {
		g         Grants
		raw, want string
	}{
		{none, `{}`, `{}`},
		{none, `null`, `null`},
		{none, ` { "dp_rank" : 1 } `, ` {  } `},
		{Pins, ` { "dp_rank" : 1 } `, ` { "dp_rank" : 1 } `},
		{all, `{"dp_rank":4294967295,"use_raw_prompt":true}`, `{"use_raw_prompt":true}`},
		{none, `{"dp_rank":1,"use_raw_prompt":true}`, `{"use_raw_prompt":true}`},
		{none, `{"use_raw_prompt":true , "dp_rank":1}`, `{"use_raw_prompt":true }`},
		{none, `{"dp_rank":1,"backend_instance_id":2,"use_raw_prompt":true,"decode_worker_id":3,"prefill_worker_id":4,"max_thinking_tokens":5,"prefill_dp_rank":6}`, `{"use_raw_prompt":true,"max_thinking_tokens":5}`},
		{none, `{"dp_r\u0061nk":1,"a":1}`, `{}`},
		{all, `{"dp_rank":1,"dp_rank":2}`, `{"dp_rank":2}`},
		{all, `{"dp_rank":1,"use_raw_prompt":true,"dp_rank":null}`, `{"use_raw_prompt":true}`},
		{all, `{"agent_hints":{"priority":1},"agent_hints":{"osl":1,"osl":2}}`, `{"agent_hints":{"osl":2}}`},
		{none, `{"agent_hints":{"priority":1,"osl":3,"strict_priority":2,"latency_sensitivity":1,"x":{}}}`, `{"agent_hints":{"osl":3}}`},
		{Priorities, `{"agent_hints":{"priority":1,"osl":3}}`, `{"agent_hints":{"priority":1,"osl":3}}`},
		{none, `{"dp_rank":1,"agent_hints":{"priority":1}}`, `{"agent_hints":{}}`},
		{none, `{"annotations":["query_instance_id:","request_id", "x-bypass-remote-prefill","output_replay_id" ,"token_ids"]}`, `{"annotations":["request_id" ,"token_ids"]}`},
		{all, `{"annotations":["x-bypass-remote-prefill", "output_replay_id"]}`, `{"annotations":[ "output_replay_id"]}`},
		{none, `{"annotations":["output_replay_id"],"extra_fields":["worker_id"]}`, `{"annotations":[]}`},
		{all, `{"extra_fields":["worker_id"],"router_config_override":{},"allowed_worker_ids":[1]}`, `{"extra_fields":["worker_id"]}`},
		{all, `{"routing_constraints":{"required_taints":null,"preferred_taints":{"a":1},"x":1}}`, `{"routing_constraints":{"preferred_taints":{"a":1}}}`},
		{none, `{"routing_constraints":{},"router":{"itl_target":1,"y":2},"metadata_upload":{"url":"u"}}`, `{"router":{"itl_target":1}}`},
		{Uploads, `{"metadata_upload":{"format":"json","url":"u"}}`, `{"metadata_upload":{"url":"u"}}`},
		{none, `{"session_control":{"session_id":"s","action":"open","timeout":5},"session_params":{"id":"s"},"cache_control":{"ttl":5},"cache_salt":"c"}`, `{"cache_salt":"c"}`},
		{Priorities, `{"cache_control":{"type":"ephemeral","ttl":5}}`, `{}`},
	} {
		if _, err := Parse([]byte(c.raw), MaxTTL); err != nil {
			t.Fatal(err)
		}
		if got := string(cutFor([]byte(c.raw), c.g, false)); got != c.want {
			t.Errorf("%s with %v: %s\nwant %s", c.raw, c.g, got, c.want)
		}
	}
	if got := string(cutFor([]byte(`{"cache_salt":"c","use_raw_prompt":true}`), all, true)); got != `{"use_raw_prompt":true}` {
		t.Errorf("beside a tenant's salt: %s", got)
	}
}

// FuzzCut checks a cut nvext with another reader: it is valid, and equals the
// original without the fields named here.
func FuzzCut(f *testing.F) {
	for _, s := range []string{every, `{"dp_rank":1,"dp_rank":2,"x":[],"x":{}}`, `{"annotations":["a","request_id","b"],"agent_hints":{"priority":1,"q":null}}`, `{"session_control":{"timeout":0,"session_id":"s"}}`, `{"cache_control":{"type":"ephemeral","ttl":" h"}}`} {
		f.Add([]byte(s), uint8(0))
		f.Add([]byte(s), uint8(Everything))
		f.Add([]byte(s), uint8(Priorities|Overrides))
	}
	f.Fuzz(func(t *testing.T, raw []byte, grants uint8) {
		before, err := Parse(raw, MaxTTL)
		if err != nil || !utf8.Valid(raw) || bytes.Contains(bytes.ToLower(raw), []byte(`\ud`)) {
			return
		}
		g := Grants(grants) & Everything
		out := cutFor(raw, g, false)
		after, err := Parse(out, MaxTTL)
		known := json.NewDecoder(bytes.NewReader(out))
		known.DisallowUnknownFields()
		if err = cmp.Or(err, known.Decode(new(wire))); err != nil {
			t.Fatalf("%s became %s: %v", raw, out, err)
		}
		// A Dynamo gets what the router applies.
		before.Restrict(g)
		if before.AgentHints != after.AgentHints || before.DPRank != after.DPRank || before.Annotations != after.Annotations {
			t.Fatalf("%s became %s: %+v, but %+v is applied", raw, out, after, before)
		}
		if dropped := after.Restrict(g); dropped != 0 {
			t.Fatalf("%s became %s, which has %v", raw, out, dropped)
		}
		var was, is map[string]any
		if err := decode(raw, &was); err != nil {
			return // null
		}
		if err := decode(out, &is); err != nil {
			t.Fatalf("%s became %s: %v", raw, out, err)
		}
		expect(was, g)
		if !reflect.DeepEqual(was, is) {
			t.Fatalf("%s became %s, want %v", raw, out, was)
		}
		if again := cutFor(out, g, false); !bytes.Equal(again, out) {
			t.Fatalf("%s became %s, and then %s", raw, out, again)
		}
	})
}

func decode(raw []byte, to *map[string]any) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	return d.Decode(to)
}

// expect does with a decoded nvext what Cut does with its bytes.
func expect(m map[string]any, g Grants) {
	drop := func(m map[string]any, names string) {
		for name := range strings.FieldsSeq(names) {
			delete(m, name)
		}
	}
	only := func(m map[string]any, names string) {
		for name, v := range m {
			if known := slices.Contains(strings.Fields(names), name); !known || v == nil {
				delete(m, name)
			}
		}
	}
	drop(m, "router_config_override allowed_worker_ids session_control session_params cache_control")
	only(m, names(fields))
	for kind, names := range map[Grants]string{Pins: "backend_instance_id prefill_worker_id decode_worker_id dp_rank prefill_dp_rank", Overrides: "routing_constraints", Uploads: "metadata_upload", Explain: "extra_fields"} {
		if g&kind == 0 {
			drop(m, names)
		}
	}
	for _, rank := range []string{"dp_rank", "prefill_dp_rank"} {
		if m[rank] == json.Number("4294967295") {
			delete(m, rank)
		}
	}
	for _, f := range fields {
		if o, ok := m[f.name].(map[string]any); ok {
			only(o, names(f.in))
		}
	}
	if hints, ok := m["agent_hints"].(map[string]any); ok && g&Priorities == 0 {
		drop(hints, "priority strict_priority latency_sensitivity")
	}
	if list, ok := m["annotations"].([]any); ok {
		m["annotations"] = slices.DeleteFunc(list, func(v any) bool {
			name, _ := v.(string)
			if name == "x-bypass-remote-prefill" || name == "llm_metrics" || name == "payload_usage" {
				return true
			}
			return g&Explain == 0 && name != "request_id" && name != "token_ids" && name != "formatted_prompt"
		})
	}
}

func names(fields []field) string {
	var all []string
	for _, f := range fields {
		all = append(all, f.name)
	}
	return strings.Join(all, " ")
}
