package nvext

import (
	"bytes"
	"cmp"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

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
		// A Dynamo gets what the router honours.
		before.Restrict(g)
		if before.AgentHints != after.AgentHints || before.DPRank != after.DPRank || before.Annotations != after.Annotations {
			t.Fatalf("%s became %s: %+v, but %+v is honoured", raw, out, after, before)
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
