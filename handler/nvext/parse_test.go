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
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
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
	got, err := Parse(raw, Options{Strict: true, Tokens: true})
	if err != nil {
		t.Fatal(err)
	}
	for s, want := range map[rawjson.Span]string{got.TokenSpan: "[0,1,4294967295]", got.SessionParams.Span: `{"id":"i","rid":"r","offset":-1,"replace":true,"drop_previous_output":false}`} {
		if string(raw[s.Start:s.End]) != want {
			t.Errorf("the span of %s is %s", want, raw[s.Start:s.End])
		}
	}
	if ids := AppendIDs(nil, raw, got.TokenSpan); !reflect.DeepEqual(ids, got.TokenData) {
		t.Errorf("the ids of the span: %v", ids)
	}
	clear(raw) // the result must not point into it
	want := Ext{
		GreedSampling: Some(true), UseRawPrompt: Some(false), BackendInstanceID: Some[uint64](math.MaxUint64),
		PrefillWorkerID: Some[uint64](1<<53 + 1), DecodeWorkerID: Some[uint64](0), DPRank: Some[uint32](UnsetRank - 1), PrefillDPRank: Some[uint32](0),
		MaxThinkingTokens: Some[uint32](math.MaxUint32),
		TokenData:         []uint32{0, 1, math.MaxUint32}, TokenCount: 3, TokenSpan: got.TokenSpan,
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
		Override:           RouterConfigOverride{Some(2.0), Some(0.0), Some(0.7), Some(true), Some(false)},
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
			if !slices.ContainsFunc(f.in, func(in field) bool { return in.required }) && f.name != "cache_control" {
				nulls = append(nulls, strconv.Quote(f.name)+`:{"`+in.name+`":null}`)
			}
		}
	}
	for _, raw := range append(nulls, "", strings.Join(nulls, " , ")) {
		got, err := Parse([]byte("{"+raw+"}"), Options{Strict: true, Tokens: true})
		got.SessionParams.Span = rawjson.Span{}
		if err != nil || !reflect.DeepEqual(got, Ext{}) {
			t.Errorf("%s: %+v, %v", raw, got, err)
		}
	}
	if got, err := Parse([]byte(" null "), Options{}); err != nil || !reflect.DeepEqual(got, Ext{}) {
		t.Errorf("null: %+v, %v", got, err)
	}
}

func TestParseSession(t *testing.T) {
	for _, c := range []struct{ raw, id, err string }{
		{`{"session_control":{"session_id":"s-1","action":"open","timeout":5}}`, "s-1", ""},
		{`{"session_control":{"session_id":"caf\u00e9\n"}}`, "café\n", ""},
		{`{"session_control":{"session_\u0069d":"s"}}`, "s", ""},
		{`{"session_control":{"session_id":""}}`, "", ""},
		{`{"session_control":null,"agent_hints":{"priority":1}}`, "", ""},
		{`{"session_control":{"session_id":"a","session_id":"b"}}`, "b", ""},
		{`{"session_control":5,"session_control":{"session_id":"b"}}`, "b", ""},
		{`{"session_control":{"session_id":"a"},"session_control":null}`, "", ""},
		{`{"token_data":[1,2,3],"session_id":"x"}`, "", ""},
		{`{"session_params":{"id":"p"}}`, "p", ""},
		{`{"session_params":{"id":"p"},"session_control":{"session_id":"s"}}`, "s", ""},
		{`{"session_control":{}}`, "", "nvext.session_control.session_id: expected a string, got nothing"},
		{`{"session_control":{"session_id":null}}`, "", "nvext.session_control.session_id: expected a string, got nothing"},
		{`{"session_control":{"session_id":"","action":"open"}}`, "", "nvext.session_control.session_id: expected a string that is not empty, got an empty one"},
		{`{"session_control":{"session_id":"a"},"session_control":{}}`, "", "nvext.session_control.session_id: expected a string, got nothing"},
		{`{"session_control":"s"}`, "", "nvext.session_control: expected an object, got string"},
		{`{"session_control":[]}`, "", "nvext.session_control: expected an object, got array"},
		{`{"session_control":{"session_id":5}}`, "", "nvext.session_control.session_id: expected a string, got number 5"},
		{`{"session_control":{"session_id":{}}}`, "", "nvext.session_control.session_id: expected a string, got object"},
		{`{"session_control":{"session_id":false}}`, "", "nvext.session_control.session_id: expected a string, got boolean false"},
		{`{"session_control":{"session_id":1` + strings.Repeat("0", 40) + `}}`, "", "nvext.session_control.session_id: expected a string, got number 1" + strings.Repeat("0", 31) + "..."},
		{`{"session_control":{"session_id":"a","action":"refork"}}`, "", `nvext.session_control.action: expected "open", "bind" or "close", got string "refork"`},
		{`{"session_control":{"session_id":"a","action":1}}`, "", `nvext.session_control.action: expected a string, got number 1`},
		{`{"session_control":{"session_id":"a","timeout":1.0}}`, "", `nvext.session_control.timeout: expected an integer from 0 to 18446744073709551615, got number 1.0`},
		{`{"session_control":{"session_id":"a","timeout":-1}}`, "", `nvext.session_control.timeout: expected an integer from 0 to 18446744073709551615, got number -1`},
	} {
		ext, err := Parse([]byte(c.raw), Options{})
		if message(err) != c.err || ext.Session() != c.id {
			t.Errorf("%s: %q, %v; want %q, %q", c.raw, ext.Session(), err, c.id, c.err)
		}
	}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// The cases of dynamo-llm's own test of session_control, and timeouts that
// overflow.
func TestParseSessionControlAsTheReference(t *testing.T) {
	o := Options{MinTimeout: 10 * time.Second, MaxTimeout: time.Hour}
	for _, c := range []struct {
		raw  string
		want SessionControl
	}{
		{`{"session_id": "sub-1", "action": "open", "timeout": 60}`, SessionControl{"sub-1", ActionOpen, time.Minute, true}},
		{`{"session_id": "sub-1", "action": "close"}`, SessionControl{"sub-1", ActionClose, 300 * time.Second, false}},
		{`{"session_id": "sub-1", "action": "bind"}`, SessionControl{"sub-1", ActionBind, 300 * time.Second, false}},
		{`{"session_id": "sub-1"}`, SessionControl{"sub-1", ActionNone, 300 * time.Second, false}},
		{`{"session_id": "sub-1", "action": null, "timeout": null}`, SessionControl{"sub-1", ActionNone, 300 * time.Second, false}},
		{`{"session_id": "s", "timeout": 0}`, SessionControl{"s", ActionNone, 10 * time.Second, true}},
		{`{"session_id": "s", "timeout": 3601}`, SessionControl{"s", ActionNone, time.Hour, true}},
		{`{"session_id": "s", "timeout": 9223372037}`, SessionControl{"s", ActionNone, time.Hour, true}},
		{`{"session_id": "s", "timeout": 18446744073709551615}`, SessionControl{"s", ActionNone, time.Hour, true}},
	} {
		ext, err := Parse([]byte(`{"session_control":`+c.raw+`}`), o)
		if err != nil || ext.SessionControl != c.want {
			t.Errorf("%s: %+v, %v; want %+v", c.raw, ext.SessionControl, err, c.want)
		}
	}
	for _, seconds := range []string{"0", "18446744073709551615"} {
		ext, err := Parse([]byte(`{"session_control":{"session_id":"s","timeout":`+seconds+`}}`), Options{})
		if d := ext.SessionControl.Timeout; err != nil || d != time.Second && d != MaxTTL {
			t.Errorf("%s: %v, %v", seconds, d, err)
		}
	}
}

func TestParseRefusesWrongTypes(t *testing.T) {
	const u64, u32, i32 = wantU64, wantU32, wantI32
	wrong := map[string]map[string]string{ // by field, by value
		wantBool:       {},
		wantObject:     {`1`: "number 1", `[]`: "array", `"{}"`: "string", `true`: "boolean true"},
		u64:            {`1.0`: "number 1.0", `1e3`: "number 1e3", `-1.0`: "number -1.0", `1E0`: "number 1E0", `"1"`: "string", `true`: "boolean true", `[1]`: "array"},
		wantString:     {`1`: "number 1", `[]`: "array", `false`: "boolean false"},
		anyNumber.want: {`"1"`: "string", `[1.5]`: "array", `true`: "boolean true"},
	}
	wrong[wantBool] = map[string]string{`1`: "number 1", `"true"`: "string", `{}`: "object"}
	wrong[wantStrings] = map[string]string{`"a"`: "string", `{}`: "object", `1`: "number 1"}
	wrong[wantIDs] = map[string]string{`1`: "number 1", `{}`: "object"}
	for _, same := range []string{u32, i32, wantI64} {
		wrong[same] = wrong[u64]
	}
	for _, same := range []string{notNegative.want, fraction.want} {
		wrong[same] = wrong[anyNumber.want]
	}
	wrong[wantPrompt], wrong[wantWeights] = wrong[wantIDs], map[string]string{`1`: "number 1", `["a"]`: "array"}
	wrong[wantTTL] = map[string]string{`1.0`: "number 1.0", `1e3`: "number 1e3", `true`: "boolean true", `{}`: "object"}
	for want, fields := range map[string]string{
		wantBool:         "greed_sampling use_raw_prompt agent_hints.speculative_prefill session_params.replace session_params.drop_previous_output router_config_override.assume_kv_reuse router_config_override.track_prefill_tokens",
		wantObject:       "agent_hints session_control session_params cache_control routing_constraints router metadata_upload router_config_override",
		u64:              "backend_instance_id prefill_worker_id decode_worker_id",
		u32:              "dp_rank prefill_dp_rank max_thinking_tokens agent_hints.strict_priority agent_hints.osl",
		i32:              "agent_hints.priority",
		wantI64:          "session_params.offset",
		wantString:       "cache_salt session_params.id session_params.rid cache_control.type metadata_upload.url",
		anyNumber.want:   "request_timestamp_ms router.ttft_target router.itl_target agent_hints.latency_sensitivity",
		notNegative.want: "router_config_override.overlap_score_credit router_config_override.prefill_load_scale router_config_override.router_temperature router_config_override.overlap_score_weight",
		fraction.want:    "router_config_override.shared_cache_multiplier",
		wantStrings:      "annotations extra_fields routing_constraints.required_taints",
		wantWeights:      "routing_constraints.preferred_taints",
		wantIDs:          "allowed_worker_ids router_config_override.allowed_worker_ids",
		wantPrompt:       "token_data",
		wantTTL:          "cache_control.ttl",
	} {
		for _, field := range strings.Fields(fields) {
			for value, got := range wrong[want] {
				_, err := Parse([]byte(at(field, value)), Options{})
				var fe *FieldError
				if message(err) != "nvext."+field+": expected "+want+", got "+got || !errors.As(err, &fe) || fe.Value {
					t.Errorf("%s: %v", at(field, value), err)
				}
			}
		}
	}
	for raw, want := range map[string]string{
		`{"annotations":["a",5]}`:                                 "nvext.annotations[1]: expected a string, got number 5",
		`{"extra_fields":[null]}`:                                 "nvext.extra_fields[0]: expected a string, got null",
		`{"token_data":[1,2,1.5]}`:                                "nvext.token_data[2]: expected " + u32 + ", got number 1.5",
		`{"token_data":[1,"2"]}`:                                  "nvext.token_data[1]: expected " + u32 + ", got string",
		`{"token_data":[1,4294967296]}`:                           "nvext.token_data[1]: expected " + u32 + ", got number 4294967296",
		`{"token_data":[-1]}`:                                     "nvext.token_data[0]: expected " + u32 + ", got number -1",
		`{"token_data":"abc"}`:                                    "nvext.token_data: expected " + wantPrompt + ", got string",
		`{"allowed_worker_ids":[1,2.0]}`:                          "nvext.allowed_worker_ids[1]: expected " + u64 + ", got number 2.0",
		`{"routing_constraints":{"required_taints":["a",{}]}}`:    "nvext.routing_constraints.required_taints[1]: expected a string, got object",
		`{"routing_constraints":{"preferred_taints":{"a":"1"}}}`:  "nvext.routing_constraints.preferred_taints.a: expected a finite number of 32 bits, got string",
		`{"request_timestamp_ms":1e400}`:                          "nvext.request_timestamp_ms: expected a finite number, got number 1e400",
		`{"max_thinking_tokens":4294967296}`:                      "nvext.max_thinking_tokens: expected " + u32 + ", got number 4294967296",
		`{"cache_salt":"` + strings.Repeat("s", MaxText+1) + `"}`: "nvext.cache_salt: expected a string of at most 8192 bytes, got one of 8193",
		`"x"`:    "nvext: expected an object, got string",
		`[1]`:    "nvext: expected an object, got array",
		` true `: "nvext: expected an object, got boolean true",
	} {
		if _, err := Parse([]byte(raw), Options{}); message(err) != want {
			t.Errorf("%.100s: %v, want %s", raw, err, want)
		}
	}
}

// at returns an nvext in which a field has a value.
func at(field, value string) string {
	if l, n, ok := strings.Cut(field, "."); ok {
		return `{"` + l + `":{"` + n + `":` + value + `}}`
	}
	return `{"` + field + `":` + value + `}`
}

// A wrong value of a field that needs a grant is an error with the grant, and is
// dropped without.
func TestWrongValuesAreErrorsWhereTrusted(t *testing.T) {
	taints := strings.Repeat(`"t",`, MaxList) + `"t"`
	for _, c := range []struct {
		g                   Grants
		field, value, wants string
	}{
		{Pins, "backend_instance_id", `-1`, wantU64 + ", got number -1"},
		{Pins, "decode_worker_id", `18446744073709551616`, wantU64 + ", got number 18446744073709551616"},
		{Pins, "prefill_worker_id", `-18446744073709551616`, wantU64 + ", got number -18446744073709551616"},
		{Pins, "dp_rank", `4294967296`, wantU32 + ", got number 4294967296"},
		{Pins, "prefill_dp_rank", `-1`, wantU32 + ", got number -1"},
		{Priorities, "agent_hints.priority", `2147483648`, wantI32 + ", got number 2147483648"},
		{Priorities, "agent_hints.strict_priority", `-1`, wantU32 + ", got number -1"},
		{Priorities, "agent_hints.latency_sensitivity", `-1e999`, anyNumber.want + ", got number -1e999"},
		{Priorities, "cache_control.type", `"persistent"`, `"ephemeral", got string "persistent"`},
		{Priorities, "cache_control.ttl", `"5d"`, wantTTL + `, got string "5d"`},
		{Priorities, "cache_control.ttl", `""`, wantTTL + `, got string ""`},
		{Priorities, "cache_control.ttl", `0`, wantTTL + `, got number 0`},
		{Priorities, "cache_control.ttl", `"-5m"`, wantTTL + `, got string "-5m"`},
		{Overrides, "router_config_override.overlap_score_credit", `-0.1`, notNegative.want + ", got number -0.1"},
		{Overrides, "router_config_override.router_temperature", `1e999`, notNegative.want + ", got number 1e999"},
		{Overrides, "router_config_override.shared_cache_multiplier", `1.01`, fraction.want + ", got number 1.01"},
		{Overrides, "routing_constraints.required_taints", "[" + taints + "]", wantStrings + ", got more"},
		{Overrides, "allowed_worker_ids", "[" + strings.Repeat("1,", MaxWorkers) + "1]", wantIDs + ", got more"},
		{Uploads, "metadata_upload.url", `" \t"`, "a string that is not empty, got an empty one"},
		{Uploads, "metadata_upload.url", `null`, "a string, got nothing"},
		{Explain, "annotations", "[" + taints + "]", wantStrings + ", got more"},
		{Explain, "extra_fields", "[" + taints + "]", wantStrings + ", got more"},
	} {
		raw := at(c.field, c.value)
		ext, err := Parse([]byte(raw), Options{})
		if err != nil {
			t.Errorf("%.80s: %v", raw, err)
			continue
		}
		again := ext
		dropped, err := ext.Restrict(Everything &^ c.g)
		ext.SessionParams.Span = rawjson.Span{}
		if ext.bad = [grantCount]*FieldError{}; err != nil || dropped != c.g || !reflect.DeepEqual(ext, Ext{}) {
			t.Errorf("%.80s untrusted: dropped %v, error %v, left %+v", raw, dropped, err, ext)
		}
		_, err = again.Restrict(c.g)
		var fe *FieldError
		if message(err) != "nvext."+c.field+": expected "+c.wants || !errors.As(err, &fe) || !fe.Value {
			t.Errorf("%.80s trusted: %v, want %s", raw, err, c.wants)
		}
	}
}

func TestParseTTL(t *testing.T) {
	for raw, want := range map[string]time.Duration{
		`{}`: DefaultTTL, `{"type":"ephemeral"}`: DefaultTTL, `{"ttl":null}`: DefaultTTL,
		`{"ttl":"5m"}`: 5 * time.Minute, `{"ttl":"1h"}`: time.Hour, `{"ttl":"30s"}`: 30 * time.Second, `{"ttl":"300"}`: 5 * time.Minute, `{"ttl":7}`: 7 * time.Second,
		`{"ttl":18446744073709551615}`: MaxTTL, `{"ttl":"9999999999999h"}`: MaxTTL, `{"ttl":"8760h"}`: MaxTTL, `{"ttl":"8761h"}`: MaxTTL,
	} {
		if ext, err := Parse([]byte(`{"cache_control":`+raw+`}`), Options{}); err != nil || ext.CacheTTL != Some(want) {
			t.Errorf("%s: %v, %v; want %v", raw, ext.CacheTTL, err, want)
		}
	}
}

func TestParseOverride(t *testing.T) {
	for raw, want := range map[string]RouterConfigOverride{
		`{"overlap_score_weight":2}`:                           {PrefillLoadScale: Some(2.0)},
		`{"overlap_score_weight":0}`:                           {PrefillLoadScale: Some(0.0), OverlapScoreCredit: Some(0.0)},
		`{"overlap_score_weight":0,"overlap_score_credit":1}`:  {PrefillLoadScale: Some(0.0), OverlapScoreCredit: Some(1.0)},
		`{"overlap_score_weight":3,"prefill_load_scale":1e-3}`: {PrefillLoadScale: Some(0.001)},
	} {
		if ext, err := Parse([]byte(`{"router_config_override":`+raw+`}`), Options{}); err != nil || ext.Override != want {
			t.Errorf("%s: %+v, %v", raw, ext.Override, err)
		}
	}
	ext, err := Parse([]byte(`{"router_config_override":{"allowed_worker_ids":[3]},"allowed_worker_ids":[1,2]}`), Options{})
	if err != nil || !reflect.DeepEqual(ext.AllowedWorkerIDs, []uint64{3}) {
		t.Errorf("%v, %v", ext.AllowedWorkerIDs, err)
	}
	ext, err = Parse([]byte(`{"allowed_worker_ids":[]}`), Options{})
	if err != nil || ext.AllowedWorkerIDs == nil || len(ext.AllowedWorkerIDs) > 0 {
		t.Errorf("%v, %v", ext.AllowedWorkerIDs, err)
	}
}

func TestParseDuplicates(t *testing.T) {
	for raw, want := range map[string]Ext{
		`{"backend_instance_id":1,"backend_instance_id":2}`:                  {BackendInstanceID: Some[uint64](2)},
		`{"backend_instance_id":1,"b\u0061ckend_instance_id":null}`:          {},
		`{"backend_instance_id":"x","backend_instance_id":2}`:                {BackendInstanceID: Some[uint64](2)},
		`{"agent_hints":{"osl":1},"agent_hints":{}}`:                         {},
		`{"token_data":["x"],"token_data":[7]}`:                              {TokenData: []uint32{7}, TokenCount: 1, TokenSpan: rawjson.Span{Start: 33, End: 36}},
		`{"token_data":[7],"token_data":null}`:                               {},
		`{"dp_rank":4294967295,"prefill_dp_rank":4294967295}`:                {},
		`{"routing_constraints":{"preferred_taints":{"a":1,"b":2,"a":3}}}`:   {RoutingConstraints: RoutingConstraints{PreferredTaints: []Taint{{"a", 3}, {"b", 2}}}},
		`{"annotations":["query_instance_id"]}`:                              {Annotations: AnnotationQueryOnly},
		`{"annotations":["query_instance_id:x"]}`:                            {Annotations: AnnotationQueryOnly},
		`{"annotations":["query_instance_ids","query_instance_id_extra:x"]}`: {Annotations: annotationOther},
		`{"token_data":[ ]}`:                                                 {TokenData: []uint32{}, TokenSpan: rawjson.Span{Start: 14, End: 17}},
	} {
		if got, err := Parse([]byte(raw), Options{Tokens: true}); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", raw, got, err)
		}
	}
}

func TestParseUnknownFields(t *testing.T) {
	for raw, want := range map[string]string{
		`{"zzz":1}`:                  "nvext.zzz: unknown field",
		`{"a":{},"session_id":1}`:    "nvext.a, nvext.session_id: unknown fields",
		`{"agent_hints":{"prio":1}}`: "nvext.agent_hints.prio: unknown field",
		`{"session_control":{"session_id":"s","bind":true}}`: "nvext.session_control.bind: unknown field",
		`{"metadata_upload":{"url":"u","format":"json"}}`:    "nvext.metadata_upload.format: unknown field",
		`{"routing_constraints":{"taints":1}}`:               "nvext.routing_constraints.taints: unknown field",
		`{"router":{"x":1}}`:                                 "nvext.router.x: unknown field",
		`{"cache_control":{"x":1}}`:                          "nvext.cache_control.x: unknown field",
		`{"session_params":{"x":1}}`:                         "nvext.session_params.x: unknown field",
		`{"router_config_override":{"x":1}}`:                 "nvext.router_config_override.x: unknown field",
		`{"agent_context":{"session_id":"run-123"}}`:         "nvext.agent_context: unknown field",
		`{"` + strings.Repeat("x", 99) + `":1}`:              "nvext." + strings.Repeat("x", 32) + "...: unknown field",
		`{` + strings.Repeat(`"x":1,`, 10) + `"y":2}`:        strings.TrimSuffix(strings.Repeat("nvext.x, ", 8), ", ") + " and 3 more: unknown fields",
	} {
		if _, err := Parse([]byte(raw), Options{}); err != nil {
			t.Errorf("%s: %v", raw, err)
		}
		_, err := Parse([]byte(raw), Options{Strict: true})
		var u *UnknownError
		if !errors.As(err, &u) || err.Error() != want {
			t.Errorf("%s: %v, want %s", raw, err, want)
		}
	}
}

func TestParseRefusesMalformed(t *testing.T) {
	for _, raw := range []string{
		``, ` `, `{`, `{} {}`, `{},`, `{"a":1,}`, `{"a" "b"}`, `{"session_control":{"session_id" "s"}}`, `{"a":01}`, `{"a":tru}`, `{"token_data":[01]}`,
		`{"token_data":[1,]}`, `{"token_data":[1 2]}`, `{"token_data":[1`, `{"token_data":[1,,2],"token_data":[1]}`, `{"\x":1}`, "{\"\n\":1}", `{"a":"\u12"}`, `{a:1}`, `[1`, `nul`,
		`{"a":` + strings.Repeat("[", rawjson.MaxDepth) + strings.Repeat("]", rawjson.MaxDepth) + `}`, strings.Repeat("[", 1<<20),
	} {
		if _, err := Parse([]byte(raw), Options{}); !errors.Is(err, ErrMalformed) {
			t.Errorf("%.60s: %v", raw, err)
		}
	}
	deep := `{"a":` + strings.Repeat("[", rawjson.MaxDepth-1) + strings.Repeat("]", rawjson.MaxDepth-1) + `}`
	if _, err := Parse([]byte(deep), Options{}); err != nil {
		t.Errorf("at the bound: %v", err)
	}
}

// The methods of an Ext that the plan uses.
func TestExtAnswers(t *testing.T) {
	for raw, want := range map[string]float64{
		`{}`: 0, `{"priority":3}`: 3, `{"priority":-3}`: 0, `{"latency_sensitivity":2.5}`: 2.5, `{"priority":4,"latency_sensitivity":9}`: 4, `{"priority":0,"latency_sensitivity":9}`: 0,
	} {
		ext, err := Parse([]byte(`{"agent_hints":`+raw+`}`), Options{})
		if got := ext.AgentHints.PriorityJump(); err != nil || got != want {
			t.Errorf("%s: %v, %v", raw, got, err)
		}
	}
	ext, _ := Parse([]byte(`{"extra_fields":["completion_token_ids"]}`), Options{})
	if ext.CheckChoices(1) != nil || !errors.Is(ext.CheckChoices(2), ErrChoices) {
		t.Error("completion_token_ids of two choices")
	}
	for _, c := range []struct{ tenant, body, top, want string }{{"", "", "", ""}, {"", "", "t", "t"}, {"", "b", "t", "b"}, {"h", "b", "t", "h"}} {
		e := Ext{Tenant: c.tenant, CacheSalt: c.body}
		if got := e.Salt(c.top); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

// FuzzParse reads an accepted nvext with another reader, which writes it anew: the
// meaning stays, and the types agree.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		every, `{"session_control":{"session_id":"a\u0000"}}`, `{"session_control":[],"session_control":{}}`, `5`, `{"a":[[[]]]}`,
		`{"token_data":[1,2],"token_data":[3],"dp_rank":4294967295}`, `{"cache_control":{"ttl":"5m"}}`, `{"agent_hints":{"priority":1e3}}`, `{"backend_instance_id":-0}`,
	} {
		f.Add([]byte(s))
	}
	o := Options{Tokens: true}
	f.Fuzz(func(t *testing.T, raw []byte) {
		ext, err := Parse(raw, o)
		var field *FieldError
		if err != nil && !errors.Is(err, ErrMalformed) && !errors.As(err, &field) {
			t.Fatalf("%+v with error %v", ext, err)
		}
		if errors.Is(err, ErrMalformed) == json.Valid(raw) && bytes.Count(raw, []byte("["))+bytes.Count(raw, []byte("{")) < rawjson.MaxDepth {
			t.Fatalf("%v, but valid is %v", err, json.Valid(raw))
		}
		if err != nil {
			return
		}
		if _, err := Parse(raw, Options{Strict: true}); err != nil {
			var unknown *UnknownError
			if !errors.As(err, &unknown) {
				t.Fatalf("strict: %v", err)
			}
		}
		// The standard library replaces invalid UTF-8 and lone surrogates. Parse
		// keeps invalid UTF-8.
		if !utf8.Valid(raw) || bytes.Contains(bytes.ToLower(raw), []byte(`\ud`)) {
			return
		}
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()
		var any map[string]any
		if err := d.Decode(&any); err != nil {
			t.Fatal(err)
		}
		checkTypes(t, any, &ext)
		anew, err := json.Marshal(any)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse(anew, o)
		if err != nil {
			t.Fatalf("%s: %v", anew, err)
		}
		for _, e := range []*Ext{&ext, &again} {
			e.TokenSpan, e.SessionParams.Span = rawjson.Span{}, rawjson.Span{}
			sortTaints(e)
		}
		if !reflect.DeepEqual(ext, again) {
			t.Fatalf("%s: %+v\nanew %s: %+v", raw, ext, anew, again)
		}
	})
}

func sortTaints(e *Ext) {
	taints := e.RoutingConstraints.PreferredTaints
	for i := range taints {
		for j := range i {
			if taints[j].Name > taints[i].Name {
				taints[i], taints[j] = taints[j], taints[i]
			}
		}
	}
}

// checkTypes compares a few fields with those of another reader.
func checkTypes(t *testing.T, raw map[string]any, ext *Ext) {
	t.Helper()
	n, _ := raw["backend_instance_id"].(json.Number)
	if id, err := strconv.ParseUint(string(n), 10, 64); (err == nil) != ext.BackendInstanceID.Set || id != ext.BackendInstanceID.Value && err == nil {
		t.Fatalf("the id %v is %+v", n, ext.BackendInstanceID)
	}
	if b, ok := raw["greed_sampling"].(bool); (Opt[bool]{b, ok}) != ext.GreedSampling {
		t.Fatalf("%v is %+v", raw["greed_sampling"], ext.GreedSampling)
	}
	control, _ := raw["session_control"].(map[string]any)
	if id, _ := control["session_id"].(string); id != ext.SessionControl.SessionID {
		t.Fatalf("the session %q is %q", id, ext.SessionControl.SessionID)
	}
	tokens, _ := raw["token_data"].([]any)
	if len(tokens) != len(ext.TokenData) || len(tokens) != ext.TokenCount {
		t.Fatalf("%d tokens are %d", len(tokens), len(ext.TokenData))
	}
	for i, token := range tokens {
		if strconv.FormatUint(uint64(ext.TokenData[i]), 10) != string(token.(json.Number)) {
			t.Fatalf("the token %v is %v", token, ext.TokenData[i])
		}
	}
}
