package tests

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
			if err != nil {
				t.Fatal(err)
			}
			caddyfile, want, ok := strings.Cut(string(data), "----------\n")
			if !ok {
				t.Fatal("no line of ten dashes")
			}
			want = strings.TrimSpace(want)
			got, err := adapt(caddyfile)
			if *update && err == nil && (want == "" || want[0] == '{') {
				if err := os.WriteFile(file, []byte(caddyfile+"----------\n"+indented(t, got)+"\n"), 0o600); err != nil {
					t.Fatal(err)
				}
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

func indented(t *testing.T, doc []byte) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Indent(&b, doc, "", "\t"); err != nil {
		t.Fatal(err)
	}
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
