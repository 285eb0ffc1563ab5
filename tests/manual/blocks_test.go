package manual

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	_ "github.com/caddy-kvrouter/kvrouter"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

var workerLine = regexp.MustCompile(`(?m)^\s*worker\s+([^*\s]\S*)`)

// wholeFile returns the Caddyfile that a block stands for. A block is a whole file, a
// directive of a site, or options of kv_router.
func wholeFile(block string, options map[string]bool) string {
	first := ""
	for line := range strings.Lines(block) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			first = line
			break
		}
	}
	word, _, _ := strings.Cut(first, " ")
	switch {
	case word == "kv_router" || word == "reverse_proxy":
		return ":8080 {\n" + block + "}\n"
	case options[word]:
		upstreams := "localhost:8001 localhost:8002"
		for _, m := range workerLine.FindAllStringSubmatch(block, -1) {
			upstreams += " " + m[1]
		}
		if regexp.MustCompile(`(?m)^\s*reverse_proxy\b`).MatchString(block) {
			upstreams = ""
		}
		return ":8080 {\nkv_router " + upstreams + " {\n" + block + "}\n}\n"
	case strings.ContainsAny(word, ":.{(") || word == "localhost":
		return block
	}
	return ":8080 {\n" + block + "}\n" // other directives
}

// validate adapts and provisions a Caddyfile. It needs none of the files and servers
// that the Caddyfile names, and leaves no files behind.
func validate(t *testing.T, caddyfile string) error {
	t.Helper()
	adapted, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		if !strings.Contains(w.Message, "not formatted") {
			return fmt.Errorf("adapting: %s", w.String())
		}
	}
	var cfg map[string]any
	if err := json.Unmarshal(adapted, &cfg); err != nil {
		return err
	}
	alone(cfg)
	cfg["logging"] = map[string]any{"logs": map[string]any{"default": map[string]any{"writer": map[string]any{"output": "discard"}}}}
	cfg["storage"] = map[string]any{"module": "file_system", "root": t.TempDir()}
	adapted, err = json.Marshal(cfg)
	if err != nil {
		return err
	}
	var parsed caddy.Config
	if err := caddy.StrictUnmarshalJSON(adapted, &parsed); err != nil {
		return err
	}
	return caddy.Validate(&parsed)
}

// alone removes what provisioning would read from files or ask servers for.
func alone(v any) {
	switch v := v.(type) {
	case map[string]any:
		delete(v, "load_files")
		delete(v, "client_authentication")
		if checks, ok := v["health_checks"].(map[string]any); ok {
			delete(checks, "active")
		}
		for _, member := range v {
			alone(member)
		}
	case []any:
		for _, element := range v {
			alone(element)
		}
	}
}

// variable is an environment variable in a Caddyfile, without a default.
var variable = regexp.MustCompile(`\{\$(\w+)\}`)

// keysSnippet returns deploy/keys.caddy without its comments.
func keysSnippet(t *testing.T) string {
	t.Helper()
	text, err := fs.ReadFile(repository, "deploy/keys.caddy")
	if err != nil {
		t.Fatal(err)
	}
	return regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(string(text), "")
}

// TestThereIsOneRecipeForKeys wants the lines of deploy/keys.caddy in Caddyfile.example, and no check of keys in the manual.
func TestThereIsOneRecipeForKeys(t *testing.T) {
	keys := keysSnippet(t)
	for _, p := range mustPages(t) {
		for _, b := range p.blocks {
			if strings.Contains(b.text, "header.Authorization") {
				t.Errorf("%s:%d: another recipe for keys: import deploy/keys.caddy", p.path, b.line)
			}
		}
	}
	example, err := fs.ReadFile(repository, "Caddyfile.example")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(keys) {
		if !strings.Contains(string(example), line) {
			t.Errorf("Caddyfile.example lacks %q of deploy/keys.caddy", line)
		}
	}
}

func TestCaddyfilesAreValid(t *testing.T) {
	options := make(map[string]bool)
	for _, o := range mustCode(t).options() {
		word, _, _ := strings.Cut(o, " ")
		options[word] = true
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1") // as in a cluster
	keys := keysSnippet(t)
	tenants := filepath.Join(t.TempDir(), "tenants.json")
	if err := os.WriteFile(tenants, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	files := strings.NewReplacer("import keys.caddy\n", keys, "/etc/caddy/tenants.json", tenants)
	valid := 0
	for _, p := range mustPages(t) {
		for _, b := range p.blocks {
			if b.lang != "caddyfile" {
				continue
			}
			valid++
			if err := validate(t, wholeFile(variable.ReplaceAllString(files.Replace(b.text), "value-of-$1"), options)); err != nil {
				t.Errorf("%s:%d: %v", p.path, b.line, err)
			}
		}
	}
	if valid < 30 {
		t.Errorf("found %d Caddyfiles only", valid)
	}
	if err := validate(t, "kv_router a:1 {\n\tnone\n}\n"); err == nil {
		t.Error("an unknown option is valid")
	}
}
