package nvext

import (
	"bytes"
	"encoding/json"
	"math/big"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// edited makes the edits, which must be in order.
func edited(t testing.TB, raw []byte, edits []rawjson.Edit) []byte {
	t.Helper()
	var out []byte
	at := 0
	for _, e := range edits {
		if e.Start < at || e.End < e.Start || e.End > len(raw) {
			t.Fatalf("%s: edits %+v", raw, edits)
		}
		out = append(append(out, raw[at:e.Start]...), e.Text...)
		at = e.End
	}
	return append(out, raw[at:]...)
}

func TestEdits(t *testing.T) {
	const all, none = Everything, Grants(0)
	o := Options{MinTimeout: 10 * time.Second, MaxTimeout: time.Hour, MaxRetention: 2 * time.Hour}
	for _, c := range []struct {
		g                Grants
		raw, old, recent string
	}{
		{none, `{}`, `{}`, `{}`},
		{none, `null`, `null`, `null`},
		{none, ` { "dp_rank" : 1 } `, ` {  } `, ` {  } `},
		{Pins, ` { "dp_rank" : 1 } `, ` { "dp_rank" : 1 } `, ` { "dp_rank" : 1 } `},
		{all, `{"dp_rank":4294967295,"use_raw_prompt":true}`, `{"use_raw_prompt":true}`, `{"use_raw_prompt":true}`},
		{none, `{"dp_rank":1,"use_raw_prompt":true}`, `{"use_raw_prompt":true}`, `{"use_raw_prompt":true}`},
		{none, `{"use_raw_prompt":true , "dp_rank":1}`, `{"use_raw_prompt":true }`, `{"use_raw_prompt":true }`},
		{none, `{"dp_rank":1,"backend_instance_id":2,"use_raw_prompt":true,"decode_worker_id":3,"prefill_worker_id":4,"max_thinking_tokens":5,"prefill_dp_rank":6}`, `{"use_raw_prompt":true,"max_thinking_tokens":5}`, `{"use_raw_prompt":true,"max_thinking_tokens":5}`},
		{none, `{"dp_r\u0061nk":1,"a":1}`, `{"a":1}`, `{}`},
		{all, `{"dp_rank":1,"dp_rank":2}`, `{"dp_rank":2}`, `{"dp_rank":2}`},
		{all, `{"dp_rank":1,"use_raw_prompt":true,"dp_rank":null}`, `{"use_raw_prompt":true}`, `{"use_raw_prompt":true}`},
		{all, `{"agent_hints":{"priority":1},"agent_hints":{"osl":1,"osl":2}}`, `{"agent_hints":{"osl":2}}`, `{"agent_hints":{"osl":2}}`},
		{none, `{"agent_hints":{"priority":1,"osl":3,"strict_priority":2,"latency_sensitivity":1,"x":{}}}`, `{"agent_hints":{"osl":3,"x":{}}}`, `{"agent_hints":{"osl":3}}`},
		{Priorities, `{"agent_hints":{"priority":1,"osl":3}}`, `{"agent_hints":{"priority":1,"osl":3}}`, `{"agent_hints":{"priority":1,"osl":3}}`},
		{none, `{"dp_rank":1,"agent_hints":{"priority":1}}`, `{"agent_hints":{}}`, `{"agent_hints":{}}`},
		{none, `{"annotations":["query_instance_id:","request_id", "x-bypass-remote-prefill","output_replay_id" ,"token_ids"]}`, `{"annotations":["request_id" ,"token_ids"]}`, `{"annotations":["request_id" ,"token_ids"]}`},
		{all, `{"annotations":["x-bypass-remote-prefill", "output_replay_id"]}`, `{"annotations":[ "output_replay_id"]}`, `{"annotations":[ "output_replay_id"]}`},
		{none, `{"annotations":["output_replay_id"],"extra_fields":["worker_id"]}`, `{"annotations":[]}`, `{"annotations":[]}`},
		{all, `{"extra_fields":["worker_id"],"router_config_override":{},"allowed_worker_ids":[1]}`, `{"extra_fields":["worker_id"]}`, `{"extra_fields":["worker_id"]}`},
		{all, `{"routing_constraints":{"required_taints":null,"preferred_taints":{"a":1},"x":1}}`, `{"routing_constraints":{"preferred_taints":{"a":1},"x":1}}`, `{"routing_constraints":{"preferred_taints":{"a":1}}}`},
		{none, `{"routing_constraints":{},"router":{"itl_target":1,"y":2},"metadata_upload":{"url":"u"}}`, `{"router":{"itl_target":1,"y":2}}`, `{"router":{"itl_target":1}}`},
		{Uploads, `{"metadata_upload":{"format":"json","url":"u"}}`, `{"metadata_upload":{"format":"json","url":"u"}}`, `{"metadata_upload":{"url":"u"}}`},
		{
			none, `{"session_control":{"session_id":"s","action":"open","timeout":5},"session_params":{"id":"s"},"cache_control":{"ttl":5},"cache_salt":"c"}`,
			`{"session_control":{"session_id":"s","action":"open","timeout":10},"session_params":{"id":"s"},"cache_salt":"c"}`, `{"cache_salt":"c"}`,
		},
		{Priorities, `{"cache_control":{"type":"ephemeral","ttl":5}}`, `{"cache_control":{"type":"ephemeral","ttl":5}}`, `{}`},
		{Priorities, `{"cache_control":{"ttl":7201,"type":null}}`, `{"cache_control":{"ttl":7200}}`, `{}`},
		{Priorities, `{"cache_control":{"ttl":"3h"}}`, `{"cache_control":{"ttl":"7200"}}`, `{}`},
		{Priorities, `{"cache_control":{"ttl":"2h"}}`, `{"cache_control":{"ttl":"2h"}}`, `{}`},
		{Priorities, `{"cache_control":{"ttl":"18446744073709551615h"}}`, `{"cache_control":{"ttl":"7200"}}`, `{}`},
		{none, `{"session_control":{"timeout":18446744073709551615,"session_id":"s"}}`, `{"session_control":{"timeout":3600,"session_id":"s"}}`, `{}`},
		{none, `{"session_control":{"timeout":60,"session_id":"s","action":null}}`, `{"session_control":{"timeout":60,"session_id":"s"}}`, `{}`},
	} {
		if _, err := Parse([]byte(c.raw), o); err != nil {
			t.Fatal(err)
		}
		for gen, want := range []string{c.old, c.recent} {
			if got := string(edited(t, []byte(c.raw), Edits(nil, []byte(c.raw), Generation(gen), c.g, o))); got != want {
				t.Errorf("%s for %d with %v: %s\nwant %s", c.raw, gen, c.g, got, want)
			}
		}
	}
}

// FuzzEdits checks an edited nvext with another reader: it is valid, and
// equals the original but for the fields that are named here.
func FuzzEdits(f *testing.F) {
	for _, s := range []string{every, `{"dp_rank":1,"dp_rank":2,"x":[],"x":{}}`, `{"annotations":["a","request_id","b"],"agent_hints":{"priority":1,"q":null}}`, `{"session_control":{"timeout":0,"session_id":"s"}}`, `{"cache_control":{"type":"ephemeral","ttl":" h"}}`} {
		f.Add([]byte(s), uint8(0), false)
		f.Add([]byte(s), uint8(Everything), true)
		f.Add([]byte(s), uint8(Priorities|Overrides), true)
	}
	o := Options{MinTimeout: 10 * time.Second, MaxTimeout: time.Hour, MaxRetention: 2 * time.Hour}
	f.Fuzz(func(t *testing.T, raw []byte, grants uint8, recent bool) {
		before, err := Parse(raw, o)
		if err != nil || !utf8.Valid(raw) || bytes.Contains(bytes.ToLower(raw), []byte(`\ud`)) {
			return
		}
		g, gen := Grants(grants)&Everything, Dynamo10
		if recent {
			gen = Dynamo13
		}
		out := edited(t, raw, Edits(nil, raw, gen, g, o))
		after, err := Parse(out, Options{Strict: recent})
		if err != nil {
			t.Fatalf("%s became %s: %v", raw, out, err)
		}
		// What goes on is what is honoured here.
		if _, err := before.Restrict(g); err != nil {
			return // it is refused
		}
		if before.AgentHints != after.AgentHints || before.DPRank != after.DPRank || before.Annotations != after.Annotations {
			t.Fatalf("%s became %s: %+v, but %+v is honoured", raw, out, after, before)
		}
		if dropped, err := after.Restrict(g); dropped != 0 {
			t.Fatalf("%s became %s, which has %v, %v", raw, out, dropped, err)
		}
		var was, is map[string]any
		if err := decode(raw, &was); err != nil {
			return // null
		}
		if err := decode(out, &is); err != nil {
			t.Fatalf("%s became %s: %v", raw, out, err)
		}
		expect(was, g, recent)
		if !reflect.DeepEqual(was, is) {
			t.Fatalf("%s became %s, want %v", raw, out, was)
		}
		if again := Edits(nil, out, gen, g, o); len(again) > 0 {
			t.Fatalf("%s became %s, which has the edits %+v", raw, out, again)
		}
	})
}

func decode(raw []byte, to *map[string]any) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	return d.Decode(to)
}

// expect does to a decoded nvext what Edits does to its bytes.
func expect(m map[string]any, g Grants, recent bool) {
	without := func(m map[string]any, names string) {
		for name := range strings.FieldsSeq(names) {
			delete(m, name)
		}
	}
	only := func(m map[string]any, names string) {
		for name, v := range m {
			if known := slices.Contains(strings.Fields(names), name); known && v == nil || recent && !known {
				delete(m, name)
			}
		}
	}
	without(m, "router_config_override allowed_worker_ids")
	only(m, strings.Join(topNames[:], " "))
	for kind, names := range map[Grants]string{Pins: "backend_instance_id prefill_worker_id decode_worker_id dp_rank prefill_dp_rank", Overrides: "routing_constraints", Uploads: "metadata_upload", Explain: "extra_fields"} {
		if g&kind == 0 {
			without(m, names)
		}
	}
	for _, rank := range []string{"dp_rank", "prefill_dp_rank"} {
		if m[rank] == json.Number("4294967295") {
			delete(m, rank)
		}
	}
	if recent {
		without(m, "session_control session_params cache_control")
	}
	if g&Priorities == 0 {
		without(m, "cache_control")
	}
	for name, in := range map[string][]string{"agent_hints": hintNames[:], "session_control": controlNames[:], "session_params": paramNames[:], "cache_control": cacheNames[:], "routing_constraints": constraintNames[:], "router": routerNames[:], "metadata_upload": uploadNames[:]} {
		if o, ok := m[name].(map[string]any); ok {
			only(o, strings.Join(in, " "))
		}
	}
	if hints, ok := m["agent_hints"].(map[string]any); ok && g&Priorities == 0 {
		without(hints, "priority strict_priority latency_sensitivity")
	}
	if control, ok := m["session_control"].(map[string]any); ok {
		if seconds, ok := control["timeout"].(json.Number); ok {
			n, _ := seconds.Int64()
			switch {
			case len(seconds) > 5 || n > 3600:
				control["timeout"] = json.Number("3600")
			case n < 10:
				control["timeout"] = json.Number("10")
			}
		}
	}
	if cache, ok := m["cache_control"].(map[string]any); ok {
		bound(cache)
	}
	if list, ok := m["annotations"].([]any); ok {
		m["annotations"] = slices.DeleteFunc(list, func(v any) bool {
			name := v.(string)
			if name == "x-bypass-remote-prefill" || name == "llm_metrics" || name == "payload_usage" {
				return true
			}
			return g&Explain == 0 && name != "request_id" && name != "token_ids" && name != "formatted_prompt"
		})
	}
}

// bound moves the ttl of a cache_control below two hours.
func bound(cache map[string]any) {
	const most = 7200
	switch ttl := cache["ttl"].(type) {
	case json.Number:
		if n, _ := new(big.Int).SetString(string(ttl), 10); n.Cmp(big.NewInt(most)) > 0 {
			cache["ttl"] = json.Number("7200")
		}
	case string:
		digits, unit := ttl, int64(1)
		for suffix, seconds := range map[string]int64{"s": 1, "m": 60, "h": 3600} {
			if rest, ok := strings.CutSuffix(ttl, suffix); ok {
				digits, unit = rest, seconds
			}
		}
		if n, _ := new(big.Int).SetString(digits, 10); n.Mul(n, big.NewInt(unit)).Cmp(big.NewInt(most)) > 0 {
			cache["ttl"] = "7200"
		}
	}
}

// TestSessionsAreRenamed has the ids that sessions have upstream, in place of the
// client's, wherever they are.
func TestSessionsAreRenamed(t *testing.T) {
	o := Options{Session: func(id string) string { return "<" + id + "\">" }}
	for raw, want := range map[string]string{
		`{"session_control":{"session_id":"a"},"session_params":{"rid":"a","id" : "b","offset":1}}`: `{"session_control":{"session_id":"<a\">"},"session_params":{"rid":"a","id" : "<b\">","offset":1}}`,
		`{"session_control":{"session_id":"a","s\u0065ssion_id":"b"},"session_params":{"id":null}}`: `{"session_control":{"s\u0065ssion_id":"<b\">"},"session_params":{}}`,
		`{"session_control":{"session_id":""},"session_params":{"id":""}}`:                          `{"session_control":{"session_id":""},"session_params":{"id":""}}`,
	} {
		var want1, got any
		out := edited(t, []byte(raw), Edits(nil, []byte(raw), Dynamo10, 0, o))
		if json.Unmarshal([]byte(want), &want1) != nil || json.Unmarshal(out, &got) != nil || !reflect.DeepEqual(got, want1) {
			t.Errorf("%s became %s, want %s", raw, out, want)
		}
	}
}
