package nvext

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// every has each field of both generations, with extreme values.
var every = strings.ReplaceAll(`{"greed_sampling":true,"use_raw_prompt":false,
"annotations":["request_id","token_ids","formatted_prompt","query_instance_id:","output_replay_id","x-bypass-remote-prefill"],
"backend_instance_id":18446744073709551615,"token_data":[0,1,4294967295],"max_thinking_tokens":4294967295,
"extra_fields":["worker_id","timing","token_ids","routed_experts","engine_data","stop_reason","completion_token_ids","prompt_logprobs","zzz"],
"prefill_worker_id":9007199254740993,"decode_worker_id":0,"dp_rank":4294967294,"prefill_dp_rank":0,
"agent_hints":{"priority":-2147483648,"strict_priority":4294967295,"osl":1,"speculative_prefill":true,"latency_sensitivity":1.5e0},
"request_timestamp_ms":1.7976931348623157e308,"session_control":{"session_id":"s","action":"open","timeout":60},
"session_params":{"id":"i","rid":"r","offset":-1,"replace":true,"drop_previous_output":false},
"cache_control":{"type":"ephemeral","ttl":"1h"},"cache_salt":"salt",
"routing_constraints":{"required_taints":["a","b"],"preferred_taints":{"c":-0.5,"d":2}},
"router":{"ttft_target":200,"itl_target":0.5},"metadata_upload":{"url":" s3://bucket/x "},"allowed_worker_ids":[1,18446744073709551615],
"router_config_override":{"overlap_score_credit":2,"prefill_load_scale":0,"router_temperature":0.7,"assume_kv_reuse":true,"track_prefill_tokens":false,"shared_cache_multiplier":1}}`, "\n", "")

func TestParseReadsEveryField(t *testing.T) {
	raw := []byte(" " + every + "\n")
	got, err := Parse(raw, MaxTTL)
	if err != nil {
		t.Fatal(err)
	}
	for s, want := range map[rawjson.Span]string{got.TokenSpan: "[0,1,4294967295]", got.SessionParams.Span: `{"id":"i","rid":"r","offset":-1,"replace":true,"drop_previous_output":false}`} {
		if string(raw[s.Start:s.End]) != want {
			t.Errorf("the span of %s is %s", want, raw[s.Start:s.End])
		}
	}
	for list, want := range map[string]int{"[ 0,1 ,\n4294967295]": 3, "[]": 0, "": -1, "[1,-2]": -1, "[1] ": -1, `{"a":1}`: -1} {
		ids, n := IDs([]byte(list))
		if n != max(0, want) || (ids == nil) != (want < 0) || want == 3 && string(ids) != "[0,1,4294967295]" {
			t.Errorf("%q has %d ids: %s", list, n, ids)
		}
	}
	clear(raw) // the result must not point into it
	want := Ext{
		GreedSampling: Some(true), UseRawPrompt: Some(false), BackendInstanceID: Some[uint64](math.MaxUint64),
		PrefillWorkerID: Some[uint64](1<<53 + 1), DecodeWorkerID: Some[uint64](0), DPRank: Some[uint32](UnsetRank - 1), PrefillDPRank: Some[uint32](0),
		MaxThinkingTokens: Some[uint32](math.MaxUint32),
		TokenCount:        3, TokenSpan: got.TokenSpan,
		Annotations: annotationsHarmless | AnnotationQueryOnly | annotationOther | annotationOwned, ExtraFields: fieldOther<<1 - 1,
		CacheSalt: "salt", MetadataUpload: "s3://bucket/x",
		AgentHints: AgentHints{
			Priority: Some[int32](math.MinInt32), StrictPriority: Some[uint32](math.MaxUint32), OSL: Some[uint32](1),
			SpeculativePrefill: Some(true), LatencySensitivity: Some(1.5),
		},
		SessionControl:     SessionControl{"s", ActionOpen, time.Minute, true},
		SessionParams:      SessionParams{"i", got.SessionParams.Span},
		CacheTTL:           Some(time.Hour),
		RoutingConstraints: RoutingConstraints{[]string{"a", "b"}, []Taint{{"c", -0.5}, {"d", 2}}},
		AllowedWorkerIDs:   []uint64{1, math.MaxUint64},
		Override:           kvscore.Override{OverlapScoreCredit: new(2.0), PrefillLoadScale: new(0.0), Temperature: new(0.7), AssumeKVReuse: new(true), TrackPrefillTokens: new(false)},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v\nwant %+v", got, want)
	}
}

// An nvext of nulls, or without fields, says nothing.
func TestParseTakesNullForAbsent(t *testing.T) {
	var nulls []string
	for _, f := range fields {
		nulls = append(nulls, strconv.Quote(f.name)+":null")
		for _, in := range f.in {
			if f.name != "session_control" && f.name != "metadata_upload" && f.name != "cache_control" {
				nulls = append(nulls, strconv.Quote(f.name)+`:{"`+in.name+`":null}`)
			}
		}
	}
	for _, raw := range append(nulls, "", strings.Join(nulls, " , ")) {
		got, err := Parse([]byte("{"+raw+"}"), MaxTTL)
		got.SessionParams.Span = rawjson.Span{}
		if err != nil || !reflect.DeepEqual(got, Ext{}) {
			t.Errorf("%s: %+v, %v", raw, got, err)
		}
	}
	if got, err := Parse([]byte(" null "), MaxTTL); err != nil || !reflect.DeepEqual(got, Ext{}) {
		t.Errorf("null: %+v, %v", got, err)
	}
}

// Of repeated fields the last one counts. Bounds apply to times only.
func TestParse(t *testing.T) {
	session := func(id string, a Action, timeout time.Duration, timed bool) Ext {
		return Ext{SessionControl: SessionControl{id, a, timeout, timed}}
	}
	const usual = DefaultTimeout
	ttl := func(d time.Duration) Ext { return Ext{CacheTTL: Some(d)} }
	for raw, want := range map[string]Ext{
		// the cases of dynamo-llm's own test, and times out of bounds
		`{"session_control":{"session_id": "sub-1", "action": "open", "timeout": 60}}`:   session("sub-1", ActionOpen, time.Minute, true),
		`{"session_control":{"session_id": "sub-1", "action": "close"}}`:                 session("sub-1", ActionClose, usual, false),
		`{"session_control":{"session_id": "s", "action": "bind", "timeout": null}}`:     session("s", ActionBind, usual, false),
		`{"session_control":{"session_id": "s", "action": null, "timeout": 0}}`:          session("s", ActionNone, time.Second, true),
		`{"session_control":{"session_id": "s", "timeout": 3601}}`:                       session("s", ActionNone, time.Hour, true),
		`{"session_control":{"session_id": "s", "timeout": 18446744073709551615}}`:       session("s", ActionNone, time.Hour, true),
		`{"session_control":{"session_\u0069d":"caf\u00e9\n"}}`:                          session("café\n", ActionNone, usual, false),
		`{"session_control":{"session_id":""}}`:                                          {},
		`{"session_control":{"session_id":"a"},"session_control":null}`:                  {},
		`{"session_control":{"session_id":"a","session_id":"b"}}`:                        session("b", ActionNone, usual, false),
		`{"backend_instance_id":1,"backend_instance_id":2}`:                              {BackendInstanceID: Some[uint64](2)},
		`{"backend_instance_id":1,"b\u0061ckend_instance_id":null}`:                      {},
		`{"token_data":["x"],"token_data":[7]}`:                                          {TokenCount: 1, TokenSpan: rawjson.Span{Start: 33, End: 36}},
		`{"token_data":[ ]}`:                                                             {TokenSpan: rawjson.Span{Start: 14, End: 17}},
		`{"dp_rank":4294967295,"prefill_dp_rank":4294967295}`:                            {},
		`{"routing_constraints":{"preferred_taints":{"a":1,"b":2,"a":3}}}`:               {RoutingConstraints: RoutingConstraints{PreferredTaints: []Taint{{"a", 3}, {"b", 2}}}},
		`{"annotations":["query_instance_id"]}`:                                          {Annotations: AnnotationQueryOnly},
		`{"annotations":["query_instance_id:x"]}`:                                        {Annotations: AnnotationQueryOnly},
		`{"annotations":["query_instance_ids","query_instance_id_extra:x"]}`:             {Annotations: annotationOther},
		`{"router_config_override":{"allowed_worker_ids":[3]},"allowed_worker_ids":[1]}`: {AllowedWorkerIDs: []uint64{3}},
		`{"allowed_worker_ids":[]}`:                                                      {AllowedWorkerIDs: []uint64{}},
		`{"cache_control":{}}`:                                                           ttl(DefaultTTL),
		`{"cache_control":{"type":"ephemeral","ttl":null}}`:                              ttl(DefaultTTL),
		`{"cache_control":{"ttl":"5m"}}`:                                                 ttl(5 * time.Minute),
		`{"cache_control":{"ttl":"1h"}}`:                                                 ttl(time.Hour),
		`{"cache_control":{"ttl":"30s"}}`:                                                ttl(30 * time.Second),
		`{"cache_control":{"ttl":"300"}}`:                                                ttl(5 * time.Minute),
		`{"cache_control":{"ttl":7}}`:                                                    ttl(7 * time.Second),
		`{"cache_control":{"ttl":18446744073709551615}}`:                                 ttl(time.Hour),
		`{"cache_control":{"ttl":"9999999999999h"}}`:                                     ttl(time.Hour),
	} {
		if got, err := Parse([]byte(raw), time.Hour); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", raw, got, err)
		}
	}
	for raw, want := range map[string]string{`{"session_params":{"id":"p"}}`: "p", `{"session_params":{"id":"p"},"session_control":{"session_id":"s"}}`: "s"} {
		if ext, err := Parse([]byte(raw), time.Hour); err != nil || ext.Session() != want {
			t.Errorf("%s: %q, %v", raw, ext.Session(), err)
		}
	}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// at returns an nvext in which a field has a value.
func at(field, value string) string {
	if l, n, ok := strings.Cut(field, "."); ok {
		return `{"` + l + `":{"` + n + `":` + value + `}}`
	}
	return `{"` + field + `":` + value + `}`
}

// An error names the field and what it should be.
func TestParseNamesWhatIsWrong(t *testing.T) {
	const (
		u64   = "an integer from 0 to 18446744073709551615"
		u32   = "an integer from 0 to 4294967295"
		i32   = "an integer from -2147483648 to 2147483647"
		bools = "a boolean"
		texts = "a string"
		list  = "an array"
		words = "an array of at most 64 strings of at most 256 bytes"
		ids   = "an array of at most 4096 integers"
		toks  = "an array of at most 16777216 integers from 0 to 4294967295"
		ttls  = `a number of seconds from 1 on, or a string such as "300", "5m" or "1h"`
		f64   = "a finite number of 64 bits"
	)
	many := strings.Repeat(`"t",`, MaxList) + `"t"`
	for _, c := range []struct{ field, value, want string }{
		{"greed_sampling", `1`, bools},
		{"agent_hints.speculative_prefill", `"true"`, bools},
		{"backend_instance_id", `1.0`, u64},
		{"backend_instance_id", `-1`, u64},
		{"dp_rank", `4294967296`, u32},
		{"agent_hints.priority", `2147483648`, i32},
		{"agent_hints.latency_sensitivity", `-1e999`, f64},
		{"router_config_override.router_temperature", `-0.1`, "a number that is not negative"},
		{"cache_salt", `{}`, texts},
		{"cache_salt", `"` + strings.Repeat("s", MaxText+1) + `"`, "a string of at most 8192 bytes"},
		{"session_control.session_id", `null`, texts},
		{"session_params.id", `false`, texts},
		{"metadata_upload.url", `null`, texts},
		{"metadata_upload.url", `" \t"`, "a string that is not empty"},
		{"annotations", `"a"`, list},
		{"annotations", `["a",5]`, texts},
		{"annotations", "[" + many + "]", words},
		{"routing_constraints.required_taints", `{}`, list},
		{"routing_constraints.required_taints", "[" + many + "]", words},
		{"allowed_worker_ids", `{}`, list},
		{"allowed_worker_ids", `[1,2.0]`, u64},
		{"allowed_worker_ids", "[" + strings.Repeat("1,", MaxWorkers) + "1]", ids},
		{"token_data", `"abc"`, toks},
		{"token_data", `[4294967296]`, toks},
		{"routing_constraints.preferred_taints", `["a"]`, "an object"},
		{"routing_constraints.preferred_taints", `{"a":"1"}`, "a finite number of 32 bits"},
		{"routing_constraints.preferred_taints", `{"` + strings.Repeat("a", MaxName+1) + `":1}`, "an object of at most 64 numbers"},
		{"cache_control.type", `"persistent"`, `"ephemeral"`},
		{"cache_control.ttl", `1.0`, ttls},
		{"cache_control.ttl", `"5d"`, ttls},
		{"cache_control.ttl", `"5mh"`, ttls},
		{"cache_control.ttl", `0`, ttls},
		{"agent_hints", `[]`, "an object"},
		{"router", `"{}"`, "an object"},
	} {
		if _, err := Parse([]byte(at(c.field, c.value)), MaxTTL); message(err) != "nvext."+c.field+": expected "+c.want {
			t.Errorf("%.80s: %v, want %s", at(c.field, c.value), err, c.want)
		}
	}
	for raw, want := range map[string]string{
		`{"session_control":{}}`:                                                 "nvext.session_control.session_id: expected a string",
		`{"session_control":{"session_id":"","action":"open"}}`:                  "nvext.session_control.session_id: expected a string that is not empty",
		`{"session_control":{"session_id":"a","action":"fork"}}`:                 `nvext.session_control.action: expected "open", "bind" or "close"`,
		`{"session_control":{"session_id":"a","action":1}}`:                      `nvext.session_control.action: expected a string`,
		`{"session_control":{"session_id":"a","timeout":-1}}`:                    "nvext.session_control.timeout: expected " + u64,
		"{" + strings.Repeat(`"x":1,`, MaxMembers) + `"x":1}`:                    "nvext: expected an object of at most 256 members, got 257",
		at("agent_hints", "{"+strings.Repeat(`"osl":1,`, MaxMembers)+`"osl":1}`): "nvext.agent_hints: expected an object of at most 256 members, got 257",
		`"x"`:    "nvext: expected an object",
		` true `: "nvext: expected an object",
	} {
		if _, err := Parse([]byte(raw), MaxTTL); message(err) != want {
			t.Errorf("%s: %v, want %s", raw, err, want)
		}
	}
}

func TestParseIgnoresUnknownFields(t *testing.T) {
	for _, raw := range []string{`{"zzz":1}`, `{"a":{},"session_id":1}`, `{"agent_hints":{"prio":1}}`, `{"router_config_override":{"x":1}}`} {
		if ext, err := Parse([]byte(raw), MaxTTL); err != nil || !reflect.DeepEqual(ext, Ext{}) {
			t.Errorf("%s: %+v, %v", raw, ext, err)
		}
	}
}

// The methods of an Ext that the plan uses.
func TestExtAnswers(t *testing.T) {
	for raw, want := range map[string]float64{
		`{}`: 0, `{"priority":3}`: 3, `{"priority":-3}`: 0, `{"latency_sensitivity":2.5}`: 2.5, `{"priority":4,"latency_sensitivity":9}`: 4, `{"priority":0,"latency_sensitivity":9}`: 0,
	} {
		ext, err := Parse([]byte(`{"agent_hints":`+raw+`}`), MaxTTL)
		if got := ext.AgentHints.PriorityJump(); err != nil || got != want {
			t.Errorf("%s: %v, %v", raw, got, err)
		}
	}
	for _, c := range []struct{ tenant, body, top, want string }{{"", "", "", ""}, {"", "", "t", "t"}, {"", "b", "t", "b"}, {"h", "b", "t", "h"}} {
		e := Ext{Tenant: c.tenant, CacheSalt: c.body}
		if got := e.Salt(c.top); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

// FuzzParse refuses invalid JSON. It reads an accepted nvext with another reader, which
// writes it anew: the meaning stays, and the types agree.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		every, `{"session_control":{"session_id":"a\u0000"}}`, `{"session_control":[],"session_control":{}}`, `5`, `{"a":[[[]]]}`,
		`{"token_data":[1,2],"token_data":[3],"dp_rank":4294967295}`, `{"cache_control":{"ttl":"5m"}}`, `{"agent_hints":{"priority":1e3}}`, `{"backend_instance_id":-0}`,
		``, ` `, `{`, `{} {}`, `{},`, `{"a":1,}`, `{"a" "b"}`, `{"session_control":{"session_id" "s"}}`, `{"a":01}`, `{"a":tru}`, `{"token_data":[01]}`,
		`{"token_data":[1,]}`, `{"token_data":[1 2]}`, `{"token_data":[1`, `{"token_data":[1,,2],"token_data":[1]}`, `{"\x":1}`, "{\"\n\":1}", `{a:1}`, `[1`, `nul`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		ext, err := Parse(raw, MaxTTL)
		if errors.Is(err, ErrMalformed) == json.Valid(raw) && bytes.Count(raw, []byte("["))+bytes.Count(raw, []byte("{")) < rawjson.MaxDepth {
			t.Fatalf("%v, but valid is %v", err, json.Valid(raw))
		}
		if err != nil {
			return
		}
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()
		var any map[string]any
		if err := d.Decode(&any); err != nil {
			t.Fatal(err)
		}
		anew, err := json.Marshal(any)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse(anew, MaxTTL)
		if err != nil {
			t.Fatalf("%s: %v", anew, err)
		}
		for _, e := range []*Ext{&ext, &again} {
			e.TokenSpan, e.SessionParams.Span = rawjson.Span{}, rawjson.Span{}
			slices.SortFunc(e.RoutingConstraints.PreferredTaints, func(a, b Taint) int { return strings.Compare(a.Name, b.Name) })
		}
		if !reflect.DeepEqual(ext, again) {
			t.Fatalf("%s: %+v\nanew %s: %+v", raw, ext, anew, again)
		}
	})
}
