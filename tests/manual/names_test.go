// Package manual checks the manual (README.md and docs) against the code. Each block
// fenced as caddyfile is valid. Each option, JSON field, metric, log line, condition,
// error code and placeholder of the code is documented, and the other way round. What code
// spans name is in the code, defaults are those of the code, and there is one recipe for
// clients' keys. Links lead somewhere, alerts have runbooks, and pages have their lengths.
//
// The checks find names in the manual by the form of a page:
//
//   - a block fenced as caddy-syntax in docs/configuration.md has all options, and a list
//     item that begins with the name in bold type describes each;
//   - tables have a column "JSON" (docs/configuration.md), "metric" and "labels",
//     "placeholder" (docs/observability.md), "skipped" (docs/kv-events.md), "command" (docs/commands.md), "code" (docs/apis.md), "log line",
//     "condition", or "reason" for fallbacks (docs/messages.md).
package manual

import (
	"encoding"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler"
	"github.com/caddy-kvrouter/kvrouter/handler/admin"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/endpointslices"
	_ "github.com/caddy-kvrouter/kvrouter/handler/speculative"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// compare fails the test for what is in one of two lists only. documented has the lines
// of the page.
func compare(t *testing.T, page, kind string, inCode []string, documented map[string]int) {
	t.Helper()
	if len(inCode) < 5 {
		t.Errorf("found %d of kind %s only", len(inCode), kind)
	}
	for _, name := range inCode {
		if _, ok := documented[name]; !ok {
			t.Errorf("%s: %s %s is not documented", page, kind, name)
		}
	}
	for name, line := range documented {
		if !slices.Contains(inCode, name) {
			t.Errorf("%s:%d: %s %s is not in the code", page, line, kind, name)
		}
	}
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
		if of.Kind() == reflect.Struct && strings.HasPrefix(of.PkgPath(), "github.com/caddy-kvrouter/") && !of.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
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

// TestJSONFieldsAreDocumented wants a row of the table for each JSON field that is no option of the same name.
func TestJSONFieldsAreDocumented(t *testing.T) {
	p := mustPage(t, "docs/configuration.md")
	fields := jsonFields(reflect.TypeFor[handler.Handler](), "")
	for _, module := range caddy.GetModules("http.handlers.kv_router.policies") {
		policy := reflect.TypeOf(module.New()).Elem()
		fields = append(fields, jsonFields(policy, "policy "+module.ID.Name()+".")...)
	}
	options, documented := mustCode(t).options(), tableFields(p)
	asOption := strings.NewReplacer("workers[]", "worker", "classes[]", "class", ".", " ")
	fields = slices.DeleteFunc(fields, func(field string) bool {
		return documented[field] == 0 && slices.Contains(options, asOption.Replace(field))
	})
	compare(t, p.path, "JSON field", fields, documented)
}

var descParts = regexp.MustCompile(`fqName: "caddy_kv_router_(\w+)".*variableLabels: \{([^}]*)\}`)

// TestOptionsAreDocumented compares the options with the summary of the syntax, and wants
// each described in a list item that begins with its name. Those of policies are in
// docs/routing.md.
func TestOptionsAreDocumented(t *testing.T) {
	options := mustCode(t).options()
	p, routing := mustPage(t, "docs/configuration.md"), mustPage(t, "docs/routing.md")
	for _, r := range routing.rows {
		for _, span := range spans(strings.Join(r.cells, " ")) {
			routing.terms[strings.Fields(span)[0]] = true
		}
	}
	terms := make(map[string]bool)
	for term := range p.terms {
		words := strings.Fields(term)
		terms[words[len(words)-1]] = true
	}
	var own []string
	for _, o := range options {
		name := o[strings.LastIndex(o, " ")+1:]
		block := slices.ContainsFunc(options, func(other string) bool { return strings.HasPrefix(other, o+" ") })
		if strings.HasPrefix(o, "policy ") {
			if !block && !routing.terms[name] {
				t.Errorf("%s: option %s is in no table and no list", routing.path, o)
			}
			continue
		}
		own = append(own, o)
		if !terms[name] && (!block || o == "policy") {
			t.Errorf("%s: option %s is not described: no list item begins with **%s**", p.path, o, name)
		}
	}
	compare(t, p.path, "option", own, syntaxOptions(p))
}

// TestMetricsAreDocumented compares the metrics with the tables that have a column
// "metric", in any page. Their column "labels" omits the label pool.
func TestMetricsAreDocumented(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	dispatch.Register(registry, zap.NewNop(), admin.Collector{}, endpointslices.Collector{})
	descs := make(chan *prometheus.Desc, 1000)
	registry.Describe(descs)
	close(descs)
	labels := make(map[string][]string)
	sorted := func(list []string) []string {
		return slices.DeleteFunc(slices.Sorted(slices.Values(list)), func(l string) bool { return l == "pool" })
	}
	for d := range descs {
		if m := descParts.FindStringSubmatch(d.String()); m != nil {
			labels[m[1]] = sorted(strings.Split(m[2], ","))
		} else {
			t.Errorf("metric %s has another prefix", d)
		}
	}
	documented, named := make(map[string]int), regexp.MustCompile(`caddy_kv_router_(\w*[a-z])`)
	for _, p := range mustPages(t) {
		for _, b := range p.blocks {
			for _, m := range named.FindAllStringSubmatch(b.text, -1) {
				if _, ok := labels[m[1]]; !ok {
					t.Errorf("%s: a block has metric %s, which is not in the code", p.path, m[1])
				}
			}
		}
		for _, r := range p.rows {
			for _, name := range spans(r.cell("metric")) {
				if documented[name] > 0 {
					t.Errorf("%s:%d: metric %s is described twice", p.path, r.line, name)
				}
				documented[name] = r.line
				if got := sorted(spans(r.cell("labels"))); !slices.Equal(got, labels[name]) {
					t.Errorf("%s:%d: metric %s has the labels %v, the table says %v", p.path, r.line, name, labels[name], got)
				}
			}
		}
	}
	compare(t, "docs", "metric", slices.Sorted(maps.Keys(labels)), documented)
}

// TestConstantsAreDocumented compares codes of errors, reasons of fallbacks and
// placeholders with the columns of tables.
func TestConstantsAreDocumented(t *testing.T) {
	c := mustCode(t)
	p := mustPage(t, "docs/apis.md")
	compare(t, p.path, "error code", c.all("handler/api", `\bCode[A-Z]\w* *= "([^"]+)"`), p.column("code"))
	reasons := c.all("handler", `\b[fF]allback[A-Z]\w* *= "([^"]+)"`)
	p = mustPage(t, "docs/messages.md")
	compare(t, p.path, "fallback", reasons, p.column("reason"))
	p = mustPage(t, "docs/observability.md")
	documented := make(map[string]int)
	for span, line := range p.column("placeholder") {
		documented[strings.TrimSuffix(strings.TrimPrefix(span, "{http.kv_router."), "}")] = line
	}
	compare(t, p.path, "placeholder", c.placeholders(), documented)
	p = mustPage(t, "docs/kv-events.md")
	reasons = c.all("kvscore/events", `reasonNames = [^{]*\{([^}]*)\}`)
	skipped := regexp.MustCompile(`\w+`).FindAllString(strings.Join(reasons, " "), -1)
	skipped = append(skipped, c.all("handler/admin", `\bby\["(\w+)"\] = f\.`)...)
	compare(t, p.path, "reason of a skipped event", skipped, p.column("skipped"))
}

// TestCommandsAreDocumented compares the commands of `caddy kv-router` with the column "command".
func TestCommandsAreDocumented(t *testing.T) {
	p := mustPage(t, "docs/commands.md")
	documented := make(map[string]int)
	for span, line := range p.column("command") {
		name, _, _ := strings.Cut(strings.TrimPrefix(span, "caddy kv-router "), " ")
		documented[name] = line
	}
	compare(t, p.path, "command", mustCode(t).all("handler/admin", `(?:\bcommand\(|\bUse: *|\b\w+Command\()"(\w+)`), documented)
}

// pattern returns the expression for a message of the code as documents write it. A
// variable part is a word in angle brackets, or a value. They may leave out what
// follows a last colon.
func pattern(message string) *regexp.Regexp {
	message, open := strings.CutSuffix(message, ": "+anything)
	parts := strings.Split(message, anything)
	for i, part := range parts {
		parts[i] = regexp.QuoteMeta(part)
	}
	expr := strings.Join(parts, ".+")
	if open {
		expr += "(: .+)?"
	}
	return regexp.MustCompile("^" + expr + "$")
}

// checkMessages compares messages of the code with the code spans in a column of the
// page's tables.
func checkMessages(t *testing.T, p *page, column string, messages []string) {
	t.Helper()
	documented := p.column(column)
	known := make(map[string]bool)
	for _, m := range messages {
		expr, has := pattern(m), false
		for span := range documented {
			if expr.MatchString(span) {
				known[span], has = true, true
			}
		}
		if !has {
			t.Errorf("%s: %s %q is not documented", p.path, column, strings.ReplaceAll(m, anything, "<...>"))
		}
	}
	for span, line := range documented {
		if !known[span] {
			t.Errorf("%s:%d: %s %q is not in the code", p.path, line, column, span)
		}
	}
}

// TestLogLinesAreDocumented compares the log lines of level warn and error with
// docs/messages.md, and the conditions with another table there. The conditions
// "fallback <reason>" have a table of their own.
func TestLogLinesAreDocumented(t *testing.T) {
	lines, conditions := mustCode(t).messages()
	if len(lines) < 8 || len(conditions) < 10 {
		t.Errorf("found %d log lines and %d conditions only", len(lines), len(conditions))
	}
	conditions = slices.DeleteFunc(conditions, func(s string) bool { return strings.HasPrefix(s, "fallback ") })
	checkMessages(t, mustPage(t, "docs/messages.md"), "log line", lines)
	checkMessages(t, mustPage(t, "docs/messages.md"), "condition", conditions)
}
