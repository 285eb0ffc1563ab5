package engine

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// steeringBody has the engines' own members, and those of nvext.
const steeringBody = `{"model":"m","priority":-5,"routed_dp_rank":3,"data_parallel_rank":3,"disagg_prefill_dp_rank":0,"id_slot":1,"retention_seconds":9,` +
	`"session_id":"s","session_params":{"id":"s","rid":"r"},"extra_key":"k","cache_salt":"victim","n":1,"kv_transfer_params":{"remote_host":"evil"},"bootstrap_host":"evil","bootstrap_port":1,"bootstrap_room":1,` +
	`"disaggregated_params":{},"nvext":{"cache_salt":"mine"}}`

// edited are the members that Adapt may change for some engine.
var edited = []string{
	"nvext", "temperature", "sampling_params", "custom_params", nameBudget, "thinking_budget_tokens", "prompt", "text", "token_ids", "input_ids",
	"prompt_token_ids", nameSession, nameParams, nameExtraKey, nameSalt, namePriority, nameRetention, nameRank, nameOldRank,
	"disagg_prefill_dp_rank", "id_slot", nameTransfer, nameHost, namePort, nameRoom, "disaggregated_params",
}

// ofPhases are those that it changes for a phase.
var ofPhases = []string{
	nameTransfer, nameHost, namePort, nameRoom, namePrefillRank, nameDisaggregated, "prompt",
	"stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "store", "background", "rid", "request_id",
}

// FuzzAdapt checks what must hold of the body for every engine, API and request. Other members
// are as the client sent them. No client names another tenant's salt or session, and none
// steers without a grant.
func FuzzAdapt(f *testing.F) {
	long := strings.Repeat("long ", 300)
	for _, body := range []string{
		fuzzed, steeringBody, strings.Replace(steeringBody, `,"nvext":{"cache_salt":"mine"}`, "", 1),
		strings.NewReplacer(`{"id":"s","rid":"r"}`, `[{"id":"s"},null,{"id":"","id":null}]`, `"extra_key":"k"`, `"extra_key":["a", 1]`).Replace(steeringBody),
		strings.NewReplacer(`{"id":"s","rid":"r"}`, `{"id":"`+long+`"}`, `"session_id":"s"`, `"session_id":"`+long+`"`, `"k"`, `"`+long+`"`).Replace(steeringBody),
		strings.NewReplacer(`{"id":"s","rid":"r"}`, `[[{"id":"s"}]]`, `"session_id":"s"`, `"session_id":7`).Replace(steeringBody),
		`{"nvext":null,"nv\u0065xt":{"cache_salt":"x","session_params":{"id":"y","id":"z"}},"cache_salt":1,"cache_salt":2}`,
		`{"cache_salt":"mine","nvext":{"session_params":{"id":"victim","id":"\u0073","rid":"r"}},"session_params":"s"}`,
		`{"priority":null,"priority":7,"routed_dp_r\u0061nk":1,"nvext":null}`,
	} {
		for path := range paths {
			for kind := range len(Names) + 1 {
				for _, bits := range []uint32{0, uint32(nvext.Everything), 1 << 7, 1<<6 | 1<<7 | 1<<8 | 1<<16, 1 << 17, 1<<6 | 3<<17} {
					f.Add([]byte(body), uint8(path), uint8(kind), bits)
				}
			}
		}
	}
	f.Fuzz(func(t *testing.T, body []byte, path, kind uint8, bits uint32) {
		a := apiOf(append(slices.Clone(paths), "/vertex_generate")[int(path)%(len(paths)+1)])
		parsed, err := api.Parse(a, body, api.Options{})
		var sent map[string]any
		if err != nil || !utf8.Valid(body) || decode(body, &sent) != nil {
			return
		}
		var ext nvext.Ext
		if parsed.NVExt != nil {
			if ext, err = nvext.Parse(parsed.NVExt, nvext.MaxTTL); err != nil {
				return
			}
		}
		bit := func(n int) bool { return bits>>n&1 == 1 }
		r := asked{
			Request{API: a.Name(), Body: parsed.Editor(body), Ext: &ext, Grants: nvext.Grants(bits) & nvext.Everything, GiveTokens: true, Rank: 1, Ranks: 1},
			Engine{Type: append(slices.Clone(Names), "")[int(kind)%(len(Names)+1)]},
		}
		if r.Body == nil {
			return // too many members
		}
		ext.Restrict(r.Grants)
		if bit(6) {
			r.Ranks = 2
		}
		if bit(7) {
			ext.Tenant = "a \"tenant\""
		}
		if bit(8) {
			on(&r)
		}
		r.Salt = ext.Salt(parsed.Salt)
		if bit(16) {
			r.Session = SessionID(r.Salt, "", "held")
		}
		if bit(17) {
			r.Phase = &Phase{Prefill: bit(18), ID: "kvr-1", Room: 7, Host: "h", Port: 1, Ranks: 2, TransferParams: []byte(`{}`), Prompt: []byte(`[1]`)}
		}
		got := r.Adapt(&r.Request)
		for _, h := range got.Headers {
			if strings.ContainsAny(h.Name+h.Value, "\r\n\x00") {
				t.Fatalf("%s has the header %s: %q", body, h.Name, h.Value)
			}
		}
		out := spliced(t, body, r.Body.Edits())
		var is map[string]any
		if err := decode(out, &is); err != nil {
			t.Fatalf("%s became %s: %v", body, out, err)
		}
		if broken := checkAdapted(&r, sent, is); broken != "" {
			t.Fatalf("%s, %s: %s became\n%s: %s", r.Type, r.API, body, out, broken)
		}
	})
}

// checkAdapted returns which rule the body that an engine gets breaks.
func checkAdapted(r *asked, sent, is map[string]any) (broken string) {
	edited := edited
	if r.Phase != nil {
		edited = append(slices.Clip(edited), ofPhases...)
	}
	for name, value := range sent {
		if !slices.Contains(edited, name) && !reflect.DeepEqual(is[name], value) {
			return name + " changed"
		}
	}
	for name := range is {
		if _, had := sent[name]; !had && !slices.Contains(edited, name) {
			return name + " is new"
		}
	}
	salt, isText := is[nameSalt].(string)
	own := r.Ext.Salt("")
	switch {
	case r.Type == Dynamo: // package nvext tests what that gets
		return ""
	case is["nvext"] != nil:
		return "nvext is left"
	case own != "" && is[nameSalt] != nil && (!isText || salt != own && salt != digest([]byte(own))):
		return "the salt is the client's"
	}
	for _, s := range kindOf(r.Type).steers {
		isOurs := (s.member == nameRank || s.member == nameOldRank) && r.Ranks > 1 || s.member == namePriority && r.Ext.AgentHints.Priority.Set ||
			s.member == nameRetention && r.Ext.CacheTTL.Set || r.Phase != nil && slices.Contains(ofPhases, s.member)
		if r.Grants&s.grant == 0 && (s.heeds == nil || s.heeds(&r.Engine)) && is[s.member] != nil && !isOurs {
			return s.member + " is not granted"
		}
	}
	if r.Type == SGLang && r.Salt != "" && !(isScoped(r.Salt, is[nameSession]) && isScoped(r.Salt, is[nameParams])) {
		return "a session has no scope"
	}
	return ""
}

// isScoped returns whether all session ids in a value have the scope of a salt.
func isScoped(salt string, v any) bool {
	switch v := v.(type) {
	case string:
		return strings.HasPrefix(v, scopeOf(salt))
	case map[string]any:
		return v["id"] == nil || isScoped(salt, v["id"])
	case []any:
		return !slices.ContainsFunc(v, func(one any) bool { return !isScoped(salt, one) })
	}
	return v == nil
}

func decode(raw []byte, to *map[string]any) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	return d.Decode(to)
}
