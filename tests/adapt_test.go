package tests

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

var update = flag.Bool("update", false, "write what is wanted into caddyfile_adapt and testdata")

// TestCaddyfileAdapts adapts each Caddyfile in caddyfile_adapt. It compares the
// outcome with the text below its line of dashes: the JSON, or a part of the
// error.
func TestCaddyfileAdapts(t *testing.T) {
	files, err := filepath.Glob("caddyfile_adapt/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			noError(t, err)
			caddyfile, want, ok := strings.Cut(string(data), "----------\n")
			if !ok {
				t.Fatal("no line of ten dashes")
			}
			want = strings.TrimSpace(want)
			got, err := adapt(caddyfile)
			if *update && err == nil && (want == "" || want[0] == '{') {
				noError(t, os.WriteFile(file, []byte(caddyfile+"----------\n"+indented(t, got)+"\n"), 0o600))
				return
			}
			switch {
			case want == "":
				t.Errorf("nothing is expected; got error %v and\n%s", err, got)
			case want[0] != '{' && err == nil:
				t.Errorf("adapted to\n%s\nwant the error %q", got, want)
			case want[0] != '{' && !strings.Contains(err.Error(), want):
				t.Errorf("got the error %q, want %q in it", err, want)
			case want[0] == '{' && err != nil:
				t.Errorf("got the error %q", err)
			case want[0] == '{' && indented(t, got) != want:
				t.Errorf("adapted to\n%s\nwant\n%s", indented(t, got), want)
			}
		})
	}
}

// TestNoSettingPanics loads what caddyfile_adapt has as JSON, with one value at a time replaced by one of another shape.
func TestNoSettingPanics(t *testing.T) {
	files, err := filepath.Glob("caddyfile_adapt/*.caddyfiletest")
	noError(t, err)
	for _, file := range files {
		data, err := os.ReadFile(file)
		noError(t, err)
		_, text, _ := strings.Cut(string(data), "----------\n")
		var config any
		if json.Unmarshal([]byte(text), &config) != nil {
			continue // an error is wanted
		}
		load := func(path string) {
			defer func() {
				if p := recover(); p != nil {
					t.Errorf("%s: %s: %v\n%s", file, path, p, debug.Stack())
				}
			}()
			changed, err := json.Marshal(config)
			noError(t, err)
			c := new(caddy.Config)
			if err := caddy.StrictUnmarshalJSON(changed, c); err != nil {
				return
			}
			c.Admin = &caddy.AdminConfig{Disabled: true}
			_ = caddy.Validate(c) // it may be valid
		}
		var walk func(path string, value any, set func(any))
		walk = func(path string, value any, set func(any)) {
			if strings.Contains(path, "kv_router") && !strings.HasSuffix(path, "/expression") { // Caddy itself panics
				for _, other := range []any{nil, []any{nil}, []any{map[string]any{}}, map[string]any{"x": nil}, -1, 1e300, ""} {
					set(other)
					load(fmt.Sprint(path, "=", other))
				}
				set(value)
			}
			switch of := value.(type) {
			case map[string]any:
				path += "/" + fmt.Sprint(of["handler"])
				for k, v := range of {
					walk(path+"/"+k, v, func(x any) { of[k] = x })
				}
			case []any:
				for i, v := range of {
					walk(fmt.Sprint(path, "/", i), v, func(x any) { of[i] = x })
				}
			}
		}
		walk("", config, func(x any) { config = x })
	}
}

func indented(t *testing.T, doc []byte) string {
	t.Helper()
	var b bytes.Buffer
	noError(t, json.Indent(&b, doc, "", "\t"))
	return b.String()
}

// TestBadSettingsAreRefused has what is well-formed and yet cannot be: the
// config is refused when it is loaded, with an error that says what is wrong.
func TestBadSettingsAreRefused(t *testing.T) {
	s := startCaddy(t, "respond 204")
	for _, v := range []struct{ name, site, want string }{
		{"NoUpstreams", "kv_router", "upstream"},
		{"WorkerThatIsNoUpstream", "kv_router a:1 b:1 {\nworker c:1 {\nid 1\n}\n}", "c:1"},
		{"WorkerTwice", "kv_router a:1 {\nworker a:1 {\nid 1\n}\nworker a:1 {\nid 2\n}\n}", "a:1"},
		{"SameID", "kv_router a:1 b:1 {\nworker a:1 {\nid 7\n}\nworker b:1 {\nid 7\n}\n}", "7"},
		{"IDOfAll", "kv_router a:1 b:1 {\nworker * {\nid 7\n}\n}", "id"},
		{"KeyFromNowhere", "kv_router a:1 {\naffinity {\nkey uri:x\n}\n}", "uri:x"},
		{"KeyOfTwoPlaceholders", "kv_router a:1 {\naffinity {\nkey {http.vars.a}{http.vars.b}\n}\n}", "affinity key"},
		{"Scope", "kv_router a:1 {\naffinity {\nscope user\n}\n}", "affinity scope: must be a placeholder"},
		{"Tenant", "kv_router a:1 {\ntenant acme\n}", `tenant: must be a placeholder such as {http.auth.user.id}, got "acme"`},
		{"ClassTwice", "kv_router a:1 {\nclass x {\nmatch path /x\n}\nclass x {\nmatch path /y\n}\n}", "class x: already specified"},
		{"ModelTwice", "kv_router a:1 {\nmodel x\nmodel x\n}", "model \"x\": specified twice"},
		{"ModelWithoutWeight", "kv_router a:1 {\nmodel x {\nto y weight 0\n}\n}", "model \"x\": one weight must be above 0"},
		{"ModelWithoutName", "kv_router a:1 {\nmodel x {\nto \"\"\n}\n}", "model \"x\": names must have 1 to 512 bytes"},
		{"ClassWeight", "kv_router a:1 {\nclass x {\nmatch path /x\nweight -1\n}\n}", "class x: weight: must be positive, got -1"},
		{"ClassLate", "kv_router a:1 {\nclass x {\nmatch path /x\nttft 1s\nlate drop\n}\n}", `class x: late: must be serve, refuse or demote, got "drop"`},
		{"ClassLateWithoutTarget", "kv_router a:1 {\nclass x {\nmatch path /x\nlate refuse\n}\n}", "class x: late: refuse needs a ttft"},
		{"ClassTolerance", "kv_router a:1 {\nclass default {\nttft 1s\ntolerance 1\n}\n}", "class default: tolerance: must be more than 1, got 1"},
		{"ClassDemotesToNone", "kv_router a:1 {\nclass x {\nmatch path /x\nttft 1s\nlate demote y\n}\n}", `class x: late demote: must name another class, got "y"`},
		{"ClassDemotesToItself", "kv_router a:1 {\nclass x {\nmatch path /x\nttft 1s\nlate demote x\n}\n}", `must name another class, got "x"`},
		{"ClassWithoutRequests", "kv_router a:1 {\nclass x {\nbackground\n}\n}", "class x: gets no requests"},
		{"DefaultClassMatches", "kv_router a:1 {\nclass default {\nmatch path /x\n}\n}", "class default: match: must not be there"},
		{"ClassTTFTFromNowhere", "kv_router a:1 {\nclass default {\nttft {a}{b}\n}\n}", "class default: ttft: must be a duration, or a placeholder"},
		{"KeyWithoutName", "kv_router a:1 {\naffinity {\nkey header:\n}\n}", "header:"},
		{"AffinityMode", "kv_router a:1 {\naffinity {\nmode firm\n}\n}", "affinity mode: must be soft, hard or off"},
		{"Split", "kv_router a:1 {\nsplit sometimes\n}", `split: must be auto, always or never, got "sometimes"`},
		{"NegativeScale", "kv_router a:1 {\npolicy dynamo {\nprefill_load_scale -1\n}\n}", "prefill_load_scale"},
		{"NotANumber", "kv_router a:1 {\npolicy dynamo {\ntemperature NaN\n}\n}", "temperature"},
		{"LoadFactorBelowOne", "kv_router a:1 {\npolicy prefix_hash {\nload_factor 0.9\n}\n}", "load_factor"},
		{"LoadFactorOfZero", "kv_router a:1 {\npolicy prefix_hash {\nload_factor 0\n}\n}", "load_factor"},
		{"BadShadow", "kv_router a:1 {\nshadow dynamo {\nprefill_load_scale -1\n}\n}", "shadow"},
		{"TinyIndex", "kv_router a:1 {\nindex {\nmemory 1KiB\n}\n}", "memory"},
		{"TinyTextBlock", "kv_router a:1 {\nindex {\ntext_block 1\n}\n}", "text_block"},
		{"PrefixThatIsNoName", "kv_router a:1 {\nresponse_headers \"X KV:\"\n}", "response_headers"},
		{"OtherTransport", "kv_router {\nreverse_proxy a:1 {\ntransport fastcgi\n}\n}", "transport"},
		{"TrustInNothingKnown", "kv_router a:1 {\ntrust pins everything\n}", "everything"},
		{"OnePoolTwoLimits", "handle /a {\nkv_router a:1 {\nworker a:1 {\nmax_running auto\n}\n}\n}\nhandle /b {\nkv_router a:1 {\nworker a:1 {\nmax_running 4\n}\n}\n}", "max_running: must be the same in all handlers, got auto and 4"},
		{"OnePoolTwoDrains", "handle /a {\nkv_router a:1 {\nworker a:1 {\ndrain\n}\n}\n}\nhandle /b {\nkv_router a:1 {\nworker a:1 {\ndrain off\n}\n}\n}", "drain: must be the same in all handlers, got true and false"},
		{"EmptyTaint", "kv_router a:1 {\nworker a:1 {\ntaints \"\"\n}\n}", "taints"},
		{"LongTaint", "kv_router a:1 {\nworker a:1 {\ntaints " + strings.Repeat("x", 257) + "\n}\n}", "taints"},
		{"OnePoolTwoTaints", "handle /a {\nkv_router a:1 {\nworker a:1 {\ntaints x\n}\n}\n}\nhandle /b {\nkv_router a:1 {\nworker a:1 {\ntaints y\n}\n}\n}", "taints"},
		{"OnePoolTwoMinds", "handle /a {\nkv_router a:1 {\nindex {\ntext_block 32\n}\n}\n}\nhandle /b {\nkv_router a:1 {\nindex {\ntext_block 128\n}\n}\n}", "pool"},
	} {
		t.Run(v.name, func(t *testing.T) {
			err := s.reload(v.site)
			if err == nil {
				if err := s.reload("respond 204"); err != nil {
					t.Error(err)
				}
				t.Fatal("accepted")
			}
			t.Log(err)
			if !strings.Contains(err.Error(), v.want) {
				t.Errorf("got the error %q, want %q in it", err, v.want)
			}
			if status, _, err := s.get(t.Context(), s.url); status != 204 {
				t.Errorf("the config before it answers %d, error %v", status, err)
			}
		})
	}
}

// nested writes a block as its lines: "affinity > key" is the line key in the block affinity.
func nested(path string) string {
	outer, inner, found := strings.Cut(path, " > ")
	if !found {
		return path
	}
	return outer + " {\n" + nested(inner) + "\n}"
}

// TestBadOptionsAreRefused has options that are unknown, are given twice, or have values of a wrong number or
// form. The Caddyfile is refused when it is adapted, with an error that says what is wrong.
func TestBadOptionsAreRefused(t *testing.T) {
	refused := func(block, want string) {
		t.Helper()
		_, err := adapt(":8080 {\nkv_router gpu-1:8000 {\n" + block + "\n}\n}")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s\ngot the error %v, want %q in it", block, err, want)
		}
	}
	for _, path := range []string{
		"affinity > key", "affinity > mode", "affinity > scope", "affinity > scope {http.auth.user.id} {http.request.host}",
		"class > background", "class chat > match", "class chat > ttft 2s 3s", "engine", "index 512MiB", "inject_usage on off", "model",
		"model a > to", "model a > to b weight", "policy", "policy power_of_two 3", "policy prefix_hash 256", "policy random > seed 1",
		"policy round_robin > temperature 0", "pool", "pool a b", "response_headers", "retry_budget 20%", "shadow", "share", "split",
		"trust", "trust > client_ip private_ranges", "worker", "worker * > kv_events", "worker * > max_running",
		"worker * > thinking_budget on off", "worker gpu-1:8000 > api_key", "worker gpu-1:8000 > api_key Bearer sk-1",
		"worker gpu-1:8000 > kv_tokens", "worker gpu-1:8000 > models", "worker gpu-1:8000 > role", "worker gpu-1:8000 > taints",
	} {
		refused(nested(path), "wrong argument count")
	}
	for _, v := range []struct {
		value, want string
		paths       []string
	}{
		{"perhaps", "must be on or off", []string{
			"enforce_cache_salt", "inject_usage", "journal", "policy dynamo > track_prefill_tokens", "require_pin", "speculative_prefill",
			"worker gpu-1:8000 > drain", "worker gpu-1:8000 > engine_load",
		}},
		{"even", "must be a number", []string{
			"class chat > weight", "policy dynamo > temperature", "policy prefix_hash > load_factor",
		}},
		{"-1s", "must be a positive duration", []string{
			"affinity > ttl", "class chat > ttft", "queue > max_wait", "queue > overflow_after", "timeouts > first_token",
		}},
		{"0", "must be a positive whole number", []string{
			"index > block_size", "policy prefix_hash > prefix_tokens", "queue > max_waiting", "worker * > dp_size",
			"worker gpu-1:8000 > dynamo_instance_id", "worker gpu-1:8000 > id", "worker gpu-1:8000 > kv_tokens",
		}},
	} {
		for _, path := range v.paths {
			option := path[strings.LastIndex(path, " ")+1:]
			refused(nested(path+" "+v.value), fmt.Sprintf("%s: %s, got '%s'", option, v.want, v.value))
		}
	}
	for _, path := range []string{
		"affinity > ttl 5m", "inject_usage", "pool a", "require_pin", "shadow random", "tenant {header.X-Org}",
		"worker * > kv_tokens 1000",
	} {
		line := strings.TrimSpace(path[strings.LastIndex(path, ">")+1:])
		option, _, _ := strings.Cut(line, " ")
		refused(strings.Replace(nested(path), line, line+"\n"+line, 1), option+" already specified")
	}
	for _, section := range []string{
		"affinity", "class chat", "index", "journal on", "model a", "queue", "share valkey://a:6379", "timeouts",
		"worker * > kv_events auto", "worker gpu-1:8000", "policy prefix_hash",
	} {
		refused(nested(section+" > colour blue"), "colour")
	}
	for _, v := range []struct{ block, want string }{
		{"affinity {\nstore valkey\n}", "unrecognized affinity option 'store'"},
		{"cache_salt enforce", "unrecognized subdirective 'cache_salt'"},
		{"class a {\nlimit file b\n}", "a limit must be like"},
		{"class chat {\nmatch @chat\n}", "unrecognized matcher name: @chat"},
		{"class chat {\nmatch no_such_matcher x\n}", "no_such_matcher"},
		{"class chat {\nttft 2s\nlate demote\n}", "wrong argument count"},
		{"class chat {\nttft 2s\nlate refuse batch\n}", "wrong argument count"},
		{"header_up Host x", "unrecognized subdirective 'header_up': options of the proxy stand in a reverse_proxy block"},
		{"index {\nmemory lots\n}", "memory: must be a size such as 64MiB, got 'lots'"},
		{"keepalive never", "keepalive: must be a positive duration or off, got 'never'"},
		{"limit", "a limit must be like 'tokens 2M per 1m'"},
		{"limit cached_weight 2", "limit cached_weight: must be between 0 and 1, got '2'"},
		{"limit dollars 5 per day", "a limit must be like 'tokens 2M per 1m', 'requests 600 per day' or 'concurrent 64', got"},
		{"limit file a\nlimit file b", "limit file already specified"},
		{"limit tokens 5 per week", "the time of a limit must be day, month, or between 1s and 24h"},
		{"limit tokens lots per day", "the amount of a limit must be a whole number such as 600, 500k or 2M, got"},
		{"max_body 64QiB", "max_body: must be a size such as 64MiB, got '64QiB'"},
		{"mode direct", "unrecognized subdirective 'mode'"},
		{"model a {\nto b weight half\n}", "weight: must be a whole number, got 'half'"},
		{"nvext strict", "unrecognized subdirective 'nvext'"},
		{"policy dynamo {\nspread_stems 2\n}", "spread_stems"},
		{"policy dynamo {\ntemperatur 0\n}", "temperatur"},
		{"policy predicted_latency {\ntemperature 0\n}", "unrecognized option of policy predicted_latency 'temperature', at Caddyfile:4"},
		{"policy prefix_hash {\nprefix_blocks 16\n}", "unrecognized option of policy prefix_hash 'prefix_blocks'"},
		{"policy psychic", "predicted_latency, prefix_hash, random, round_robin"},
		{"poool main", "unrecognized subdirective 'poool'"},
		{"resume always", "resume: must be on, exact or off, got 'always'"},
		{"retry_budget 20 10", "retry_budget: must be like '20% 10/s', got '20 10'"},
		{"shadow dynamo {\ntemperatur 0\n}", "temperatur"},
		{"shadow psychic", "predicted_latency, prefix_hash, random, round_robin"},
		{"trust pins {\nno_such_matcher x\n}", "no_such_matcher"},
		{"trust pins {\n}", "trust: the block has no matchers"},
		{"usage inject", "unrecognized subdirective 'usage'"},
		{"worker * {\ncache_salt enforce\n}", "cache_salt: must be on, off or auto, got 'enforce'"},
		{"worker * {\nmax_running 0\n}", "max_running: must be a positive whole number or auto, got '0'"},
		{"worker * {\nmax_running unlimited\n}", "max_running: must be a positive whole number or auto, got 'unlimited'"},
		{"worker * {\npriority high\n}", "priority: must be on, off or auto, got 'high'"},
		{"worker 10.0.0.1:8000 {\nrole backup\nheader Authorization\n}", "wrong argument count or unexpected line ending after 'Authorization'"},
	} {
		refused(v.block, v.want)
	}
}
