package manual

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler"
	"github.com/caddy-kvrouter/kvrouter/handler/admin"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// compare returns what is in one of two lists only. documented has the lines of the
// page.
func compare(page, kind string, inCode []string, documented map[string]int) (found []string) {
	for _, name := range inCode {
		if _, ok := documented[name]; !ok {
			found = append(found, fmt.Sprintf("%s: %s %s is not documented", page, kind, name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(documented)) {
		if !slices.Contains(inCode, name) {
			found = append(found, fmt.Sprintf("%s:%d: %s %s is not in the code", page, documented[name], kind, name))
		}
	}
	return found
}

// syntaxOptions returns the options in the page's caddy-syntax block, as paths.
func syntaxOptions(p *page) map[string]int {
	found := make(map[string]int)
	for _, b := range p.blocks {
		if b.lang != "caddy-syntax" {
			continue
		}
		var within []string
		for i, line := range strings.Split(b.text, "\n") {
			words := strings.Fields(line)
			if len(words) == 0 || words[0][0] == '<' {
				continue
			}
			if words[0] == "}" {
				within = within[:max(0, len(within)-1)]
				continue
			}
			if words[0] != "kv_router" {
				found[strings.Join(append(slices.Clip(within), words[0]), " ")] = b.line + i
			}
			if words[len(words)-1] == "{" {
				within = append(within, words[0])
				if words[0] == "kv_router" {
					within = within[:0]
				}
			}
		}
	}
	return found
}

// checkOptions compares the options with the page's summary of the syntax, and wants
// each described in a list item that begins with its name.
func checkOptions(p *page, options []string) (found []string) {
	var own []string
	terms := make(map[string]bool)
	for _, i := range p.items {
		words := strings.Fields(strings.Trim(i.term, "`"))
		terms[words[len(words)-1]] = true
	}
	blocks := make(map[string]bool)
	for _, o := range options {
		if block, _, ok := strings.Cut(o, " "); ok {
			blocks[block] = true
		}
	}
	for _, o := range options {
		if strings.HasPrefix(o, "policy ") {
			continue // see checkPolicyOptions
		}
		own = append(own, o)
		name := o[strings.LastIndex(o, " ")+1:]
		if !terms[name] && (!blocks[o] || o == "policy") {
			found = append(found, fmt.Sprintf("%s: option %s is not described: no list item begins with **%s**", p.path, o, name))
		}
	}
	return append(found, compare(p.path, "option", own, syntaxOptions(p))...)
}

func TestOptionsAreDocumented(t *testing.T) {
	report(t, checkOptions(mustPage(t, "docs/configuration.md"), codeOptions(t)))
}

// TestPolicyOptionsAreDocumented wants each option of a policy in a code span.
func TestPolicyOptionsAreDocumented(t *testing.T) {
	p := mustPage(t, "docs/routing.md")
	text := make(map[string]bool)
	for _, r := range p.rows {
		for _, cell := range r.cells {
			for _, span := range spans(cell) {
				text[strings.Fields(span)[0]] = true
			}
		}
	}
	for _, i := range p.items {
		text[strings.Trim(i.term, "`")] = true
	}
	for _, o := range codeOptions(t) {
		if words := strings.Fields(o); words[0] == "policy" && len(words) == 3 && !text[words[2]] {
			t.Errorf("%s: option %s is in no table and no list", p.path, o)
		}
	}
}

// jsonFields returns the paths of a configuration's fields in JSON: "index.memory",
// "workers[].dial".
func jsonFields(t reflect.Type, prefix string) (paths []string) {
	for field := range fieldsOf(t) {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "" || name == "-" {
			continue
		}
		path, of := prefix+name, field.Type
		for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
			if of.Kind() == reflect.Slice {
				path += "[]"
			}
			of = of.Elem()
		}
		if of.Kind() == reflect.Struct && strings.HasPrefix(of.PkgPath(), "github.com/caddy-kvrouter/") {
			paths = append(paths, jsonFields(of, path+".")...)
			continue
		}
		paths = append(paths, prefix+name)
	}
	return paths
}

// fieldsOf yields the fields of a struct and of those embedded in it.
func fieldsOf(t reflect.Type) func(func(reflect.StructField) bool) {
	return func(yield func(reflect.StructField) bool) {
		for _, f := range reflect.VisibleFields(t) {
			if !f.Anonymous && !yield(f) {
				return
			}
		}
	}
}

// tableFields returns the paths in the first column of the table of JSON: cells such
// as `pool`, or `index`: `memory`, or `policy` `dynamo`: `preset`.
func tableFields(p *page) map[string]int {
	found := make(map[string]int)
	for _, r := range p.rows {
		before, after, nested := strings.Cut(r.cell("JSON"), "`: `")
		if !nested {
			for _, name := range spans(before) {
				found[name] = r.line
			}
			continue
		}
		prefix := strings.Join(spans(before+"`"), " ")
		for _, name := range spans("`" + after) {
			found[prefix+"."+name] = r.line
		}
	}
	return found
}

func TestJSONFieldsAreDocumented(t *testing.T) {
	p := mustPage(t, "docs/configuration.md")
	fields := jsonFields(reflect.TypeFor[handler.Handler](), "")
	for _, module := range caddy.GetModules("http.handlers.kv_router.policies") {
		policy := reflect.TypeOf(module.New()).Elem()
		fields = append(fields, jsonFields(policy, "policy "+module.ID.Name()+".")...)
	}
	report(t, compare(p.path, "JSON field", fields, tableFields(p)))
}

var descParts = regexp.MustCompile(`fqName: "caddy_kv_router_(\w+)".*variableLabels: \{([^}]*)\}`)

// codeMetrics returns the labels of the metrics, by name without the common prefix.
func codeMetrics(t *testing.T) map[string][]string {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	dispatch.Register(registry, zap.NewNop(), admin.Collector{})
	descs := make(chan *prometheus.Desc, 1000)
	registry.Describe(descs)
	close(descs)
	metrics := make(map[string][]string)
	for d := range descs {
		m := descParts.FindStringSubmatch(d.String())
		if m == nil {
			t.Errorf("metric %s has another prefix", d)
			continue
		}
		metrics[m[1]] = strings.Split(m[2], ",")
	}
	return metrics
}

// checkMetrics compares the metrics with the tables that have a column "metric". Their
// column "labels" omits the label pool, which all metrics have.
func checkMetrics(p *page, metrics map[string][]string) (found []string) {
	documented := make(map[string]int)
	for _, r := range p.rows {
		for _, name := range spans(r.cell("metric")) {
			name = strings.TrimPrefix(name, "caddy_kv_router_")
			documented[name] = r.line
			if !slices.Contains(r.header, "labels") {
				continue
			}
			want := slices.DeleteFunc(slices.Sorted(slices.Values(metrics[name])), func(l string) bool { return l == "pool" })
			got := slices.DeleteFunc(slices.Sorted(slices.Values(spans(r.cell("labels")))), func(l string) bool { return l == "pool" })
			if metrics[name] != nil && !slices.Equal(got, want) {
				found = append(found, fmt.Sprintf("%s:%d: metric %s has the labels %v, the table says %v", p.path, r.line, name, want, got))
			}
		}
	}
	return append(found, compare(p.path, "metric", slices.Sorted(maps.Keys(metrics)), documented)...)
}

func TestMetricsAreDocumented(t *testing.T) {
	metrics := codeMetrics(t)
	if len(metrics) < 20 {
		t.Errorf("found %d metrics only", len(metrics))
	}
	report(t, checkMetrics(mustPage(t, "docs/observability.md"), metrics))
}

// TestErrorCodesAreDocumented compares the codes of the router's own errors with the
// table in docs/apis.md that has a column "code".
func TestErrorCodesAreDocumented(t *testing.T) {
	codes := mustCode(t).constants("handler/api", regexp.MustCompile(`^Code[A-Z]`))
	if len(codes) < 8 {
		t.Errorf("found %d codes only", len(codes))
	}
	p := mustPage(t, "docs/apis.md")
	report(t, compare(p.path, "error code", codes, p.column("code")))
	if !p.spans["stream_broken"] {
		t.Errorf("%s: the error code stream_broken of broken streams is not documented", p.path)
	}
}

// TestFallbacksAreDocumented compares the reasons of fallbacks with the table in
// docs/troubleshooting.md that has a column "reason".
func TestFallbacksAreDocumented(t *testing.T) {
	c := mustCode(t)
	var reasons []string
	for folder := range c.packages {
		reasons = append(reasons, c.constants(folder, regexp.MustCompile(`^[fF]allback[A-Z]`))...)
	}
	if len(reasons) < 5 {
		t.Errorf("found %d reasons only", len(reasons))
	}
	p := mustPage(t, "docs/troubleshooting.md")
	report(t, compare(p.path, "fallback", reasons, p.column("reason")))
}

var placeholder = regexp.MustCompile(`^\{http\.kv_router\.(\w+)\}$`)

// checkPlaceholders compares the placeholders with the table that has a column
// "placeholder".
func checkPlaceholders(p *page, names []string) []string {
	documented := make(map[string]int)
	for span, line := range p.column("placeholder") {
		if m := placeholder.FindStringSubmatch(span); m != nil {
			documented[m[1]] = line
		} else {
			documented[span] = line
		}
	}
	return compare(p.path, "placeholder", names, documented)
}

func TestPlaceholdersAreDocumented(t *testing.T) {
	names := mustCode(t).placeholders()
	if len(names) < 5 {
		t.Errorf("found %d placeholders only", len(names))
	}
	report(t, checkPlaceholders(mustPage(t, "docs/observability.md"), names))
}
