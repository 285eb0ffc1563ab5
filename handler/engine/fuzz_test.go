package engine

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

const nvextMember = "nvext"

// fuzzPaths are the paths of the APIs, and one outside them.
var fuzzPaths = append(slices.Clone(paths), "/vertex_generate")

// steeringBody has the engines' own members, and those of nvext.
const steeringBody = `{"model":"m","priority":-5,"routed_dp_rank":3,"data_parallel_rank":3,"disagg_prefill_dp_rank":0,"id_slot":1,"retention_seconds":9,` +
	`"session_id":"s","session_params":{"id":"s","rid":"r"},"extra_key":"k","cache_salt":"victim","n":1,"nvext":{"cache_salt":"mine"}}`

// FuzzAdapt compares the body that an engine gets with the oracle's, an independent reader.
// Each named member has the expected value, and all others are as the client sent them.
func FuzzAdapt(f *testing.F) {
	long := strings.Repeat("long ", 300)
	bodies := []string{
		fuzzed, steeringBody, strings.Replace(steeringBody, `,"nvext":{"cache_salt":"mine"}`, "", 1),
		strings.NewReplacer(`{"id":"s","rid":"r"}`, `[{"id":"s"},{"id":1},{}]`, `"extra_key":"k"`, `"extra_key":["a", 1]`).Replace(steeringBody),
		`{"sampling_params":[{},{"custom_params":{}}],"nvext":{"greed_sampling":true,"max_thinking_tokens":1}}`,
		`{"nvext":null,"nv\u0065xt":{"cache_salt":"x","session_params":{"id":"y","id":"z"}},"cache_salt":1,"cache_salt":2}`,
		strings.NewReplacer(`{"id":"s","rid":"r"}`, `[{"id":"s"},null,{"id":"","id":null}]`, `"session_id":"s"`, `"session_id":""`).Replace(steeringBody),
		strings.NewReplacer(`{"id":"s","rid":"r"}`, `{"id":"`+long+`"}`, `"session_id":"s"`, `"session_id":"`+long+`"`, `"k"`, `"`+long+`"`).Replace(steeringBody),
		strings.NewReplacer(`{"id":"s","rid":"r"}`, `[[{"id":"s"}]]`, `"session_id":"s"`, `"session_id":7`).Replace(steeringBody),
		strings.Replace(steeringBody, `{"id":"s","rid":"r"}`, `{"id":7,"id":"s"}`, 1),
		`{"cache_salt":"mine","nvext":{"session_params":{"id":"victim","id":"\u0073","rid":"r"}},"session_params":"s"}`,
		`{"session_params":null,"nvext":{"session_params":{}}}`, `{"session_params":{"rid":"r","\u0069d":"s","id":null}}`,
		`{"priority":null,"priority":7,"routed_dp_r\u0061nk":1,"nvext":null}`,
		`{"nvext":{"agent_hints":{"priority":-2147483648}},"priority":1,"temperature":0.5}`,
	}
	// With and without grants, priorities (as set or as reported), a tenant and
	// several ranks.
	const all, tenant, ranks, on, reported, off, held = uint32(nvext.Everything), 1 << 7, 1<<6 | 1<<10, 1<<8 | 1<<9, 1<<11 | 1<<12 | 1<<13, 1 << 15, 1 << 16
	for _, body := range bodies {
		for i := range fuzzPaths {
			for k := range len(Names) + 1 {
				for _, bits := range []uint32{0, all, on, all | on, reported, all | reported | 1<<14, tenant | reported, all | tenant | ranks | on, ranks, all | off, held, all | tenant | held} {
					f.Add([]byte(body), uint8(i), uint8(k), bits)
				}
			}
		}
	}
	f.Fuzz(func(t *testing.T, body []byte, path, engine uint8, bits uint32) {
		a, kind := apiOf(fuzzPaths[int(path)%len(fuzzPaths)]), append(slices.Clone(Names), "")[int(engine)%(len(Names)+1)]
		parsed, err := api.Parse(a, body, api.Options{})
		if err != nil || len(body) > maxParams || !utf8.Valid(body) || bytes.Contains(bytes.ToLower(body), []byte(`\ud`)) {
			return
		}
		o, ok := readOracle(body)
		if !ok {
			return
		}
		var ext nvext.Ext
		if parsed.NVExt != nil {
			if ext, err = nvext.Parse(parsed.NVExt, nvext.Options{}); err != nil {
				return
			}
			if ext.CacheTTL.Set {
				ext.CacheTTL = nvext.Some(nvext.DefaultTTL / 5)
			}
		}
		bit := func(n int) bool { return bits>>n&1 == 1 }
		r := asked{
			Request{API: a.Name(), Body: parsed.Editor(body), Ext: &ext, Grants: nvext.Grants(bits) & nvext.Everything, GiveTokens: true, Rank: 1, Ranks: 1},
			Engine{Type: kind},
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
		r.Salt = ext.Salt(parsed.Salt)
		if bit(16) {
			r.Session = "a \"held\" one"
		}
		switches := [...]Switch{Auto, On}
		r.Settings = Settings{Priority: switches[bits>>8&1], ThinkingBudget: switches[bits>>9&1]}
		if bit(15) {
			r.Settings.Priority, r.Settings.ThinkingBudget = Off, Off
		}
		r.Info = Info{PriorityEviction: bit(11), StrictThinking: bit(12), Priority: bit(13), LowFirst: bit(14)}
		if bit(10) {
			r.Info.Version = map[string]string{SGLang: "0.5.10"}[kind]
		}
		o.kind, o.api, o.tenant, o.held, o.rank, o.ranks, o.info, o.set = kind, a.Name(), ext.Tenant, r.Session, 1, r.Ranks, r.Info, r.Settings
		o.pins, o.priorities, o.uploads = r.Grants&nvext.Pins != 0, r.Grants&nvext.Priorities != 0, r.Grants&nvext.Uploads != 0
		o.expect()
		compare(t, &o, &r, body)
	})
}

// compare compares the engine's request with the oracle's.
func compare(t *testing.T, o *oracle, r *asked, body []byte) {
	t.Helper()
	got := r.Adapt(&r.Request)
	for _, h := range got.Headers {
		if strings.ContainsAny(h.Name+h.Value, "\r\n\x00") {
			t.Fatalf("%s has the header %s: %q", body, h.Name, h.Value)
		}
	}
	out := spliced(t, body, r.Body.Edits())
	var is doc
	if err := decode(out, &is); err != nil {
		t.Fatalf("%s became %s: %v", body, out, err)
	}
	if o.kind == Dynamo {
		checkNVExt(t, o.want, is, out)
	}
	if want, ok := o.want["priority"].(float64); ok {
		n, _ := is["priority"].(json.Number)
		if f, err := strconv.ParseFloat(string(n), 64); err != nil || math.Abs(f-want) > 1e-12 || f < 0 || f > 1 {
			t.Fatalf("%s, %s: priority %s, want %v", body, o.kind, n, want)
		}
		o.want["priority"] = is["priority"]
	}
	if !reflect.DeepEqual(is, o.want) {
		want, _ := json.Marshal(o.want)
		t.Fatalf("%s, %s:\n%s became\n%s, want\n%s", o.kind, o.api, body, out, want)
	}
	slices.Sort(o.lacks)
	o.lacks = slices.Compact(o.lacks) // one of nvext's and one of the body's own
	if lacks := slices.Collect(got.Unsupported.Names); !same(lacks, o.lacks) {
		t.Fatalf("%s, %s: %s lacks %v, want %v", o.kind, o.api, body, lacks, o.lacks)
	}
	if dropped := slices.Collect(got.Dropped.Names); !same(dropped, o.dropped) {
		t.Fatalf("%s, %s: of %s was dropped %v, want %v", o.kind, o.api, body, dropped, o.dropped)
	}
}

// same compares lists in any order.
func same(a, b []string) bool {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(a, b)
}

// checkNVExt checks that a Dynamo gets one nvext, and removes it. Package nvext
// tests its content.
func checkNVExt(t *testing.T, want, is doc, out []byte) {
	t.Helper()
	left, there := is[nvextMember]
	if !there && want[nvextMember] != nil {
		t.Fatalf("%s has no nvext", out)
	}
	if bytes.Count(out, []byte(`"`+nvextMember+`"`)) == 1 && left != nil {
		raw, _ := json.Marshal(left)
		if _, err := nvext.Parse(raw, nvext.Options{}); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
	}
	delete(want, nvextMember)
	delete(is, nvextMember)
}

func decode(raw []byte, to *map[string]any) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	return d.Decode(to)
}
