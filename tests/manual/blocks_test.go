package manual

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"

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

// checkBlocks returns the caddyfile blocks that Caddy refuses.
func checkBlocks(t *testing.T, files fs.FS, names []string, options map[string]bool) (found []string) {
	t.Helper()
	for _, name := range names {
		p, err := readPage(files, name)
		if err != nil {
			found = append(found, err.Error())
			continue
		}
		for _, b := range p.blocks {
			if b.lang != "caddyfile" {
				if b.lang != "caddy-syntax" && regexp.MustCompile(`(?m)^\s*kv_router\b.*\{$`).MatchString(b.text) {
					found = append(found, fmt.Sprintf("%s:%d: a Caddyfile must be fenced as caddyfile, not as %q", name, b.line, b.lang))
				}
				continue
			}
			if err := validate(t, wholeFile(variable.ReplaceAllString(b.text, "value-of-$1"), options)); err != nil {
				found = append(found, fmt.Sprintf("%s:%d: %v", name, b.line, err))
			}
		}
	}
	return found
}

func TestCaddyfilesAreValid(t *testing.T) {
	needManual(t)
	names := append(make([]string, 0, len(pages)+1), "README.md")
	for _, name := range pages {
		names = append(names, "docs/"+name+".md")
	}
	report(t, checkBlocks(t, repository, names, firstWords(codeOptions(t))))
}

// TestBadCaddyfilesAreFound has one block of each kind, right and wrong.
func TestBadCaddyfilesAreFound(t *testing.T) {
	block := func(text string) string { return "```caddyfile\n" + text + "```\n" }
	files := fstest.MapFS{"docs/a.md": {Data: []byte(
		block(":80 {\n\tkv_router a:1 b:1\n}\n") +
			block("# comment\nkv_router a:1 {\n\tpool x\n}\n") +
			block("worker a:1 {\n\tid 7\n}\npool x\n") +
			block("reverse_proxy a:1\n") +
			block("handle /v1/* {\n\tkv_router a:1\n}\n") +
			block("{\n\tadmin off\n}\n:80 {\n\tkv_router a:1\n}\n") +
			block("llm.example.com {\n\ttls cert.pem key.pem\n\tkv_router a:1\n}\n") +
			block(":81 {\n\tkv_router a:1 {\n\t\tnone\n\t}\n}\n") +
			block("kv_router a:1 {\n\tmax_body x\n}\n") +
			block("pool x y\n") +
			block("kv_router\n") +
			"```\nkv_router a:1 {\n}\n```\n")}}
	found := checkBlocks(t, files, []string{"docs/a.md"}, map[string]bool{"worker": true, "pool": true})
	if len(found) != 5 {
		t.Errorf("found %d errors, want 5:\n%s", len(found), strings.Join(found, "\n"))
	}
	for i, want := range []string{
		"docs/a.md:41: parsing caddyfile tokens for 'kv_router': unrecognized subdirective 'none'", "max_body", "wrong argument count", "no upstreams", "fenced as caddyfile",
	} {
		if i < len(found) && !strings.Contains(found[i], want) {
			t.Errorf("found %q, want %q in it", found[i], want)
		}
	}
}
