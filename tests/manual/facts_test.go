package manual

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/dustin/go-humanize"

	"github.com/caddyserver/caddy/v2"
)

// The forms of code spans that name something of the router. Names of others, such as Caddy's options, have other forms.
var (
	ownMetric  = regexp.MustCompile(`^(?:caddy_kv_router_)?([a-z]+(?:_[a-z0-9]+)*_(?:total|seconds|ratio))(?:\{.*\})?$`)
	ownMessage = regexp.MustCompile(`^[a-z](?:[\w ,;'./-]|: )+$`)
	ownHeader  = regexp.MustCompile(`^X-KV-(\w[\w-]*)$`)
	ownMember  = regexp.MustCompile(`^[a-z_]+(?:\[\])?(?:\.[a-z_0-9]+(?:\[\])?)+$`)
	ownPath    = regexp.MustCompile(`^(?:affinity|cmd|deploy|docs|handler|kvscore|tests)/[\w./-]*\w$`)
	ownOption  = regexp.MustCompile(`^(worker|index|affinity|journal|share|queue|resume|timeouts|class|policy) ([a-z_]+)(?: .*)?$`)
	goFile     = regexp.MustCompile(`^[a-z_]+\.go$`)
	fileName   = regexp.MustCompile(`\.(?:go|md|json|jsonl|ya?ml|toml|sh|caddy|svg|service|example|com)$`)
)

// othersMessages are commands in the manual, and messages and options of Caddy and of engines.
var othersMessages = regexp.MustCompile(`^(?:go|docker|sudo|caddy|curl|vllm|git|order) |^timeouts (?:read_body|read|write)$|^aborting with incomplete response$|^failed getting dynamic upstreams|^session id \.\.\. does not exist$|^close was requested for session`)

// TestNamesOfThePagesAreInTheCode looks up what the code spans of the manual name, also outside the tables with checks of
// their own. These are metrics, messages, headers, members of JSON, files and options.
func TestNamesOfThePagesAreInTheCode(t *testing.T) {
	c := mustCode(t)
	api, err := fs.ReadFile(repository, "docs/openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	_, _ = all.Write(api)
	for _, src := range c {
		_, _ = all.WriteString(src)
	}
	code := regexp.MustCompile(`(?m)(?:^|\s)//\s.*$`).ReplaceAllString(all.String(), "") // comments may say anything
	words := make(map[string]bool)
	for _, w := range regexp.MustCompile(`\w+`).FindAllString(code, -1) {
		words[w] = true
	}
	options, syntax := c.options(), make(map[string]string) // the line of each option
	for _, b := range mustPage(t, "docs/configuration.md").blocks {
		for line := range strings.Lines(b.text) {
			if word, rest, ok := strings.Cut(strings.TrimSpace(line), " "); ok && b.lang == "caddy-syntax" {
				syntax[word] += rest
			}
		}
	}
	for _, m := range caddy.GetModules("http.handlers.kv_router.policies") {
		syntax["policy"] += " " + m.ID.Name()
	}
	// problem returns what is wrong with a span, "" if nothing is.
	problem := func(span string) string {
		if m := ownMetric.FindStringSubmatch(span); m != nil && !words[m[1]] && !words[strings.TrimPrefix(m[1], "kubernetes_")] {
			return "no such metric or field"
		}
		if m := ownHeader.FindStringSubmatch(span); m != nil {
			name := strings.ToLower(strings.ReplaceAll(m[1], "-", "_"))
			if !strings.Contains(code, `name: "`+name+`"`) && !strings.Contains(code, `"`+m[1]+`"`) {
				return "no such header"
			}
		}
		if ownMember.MatchString(span) && !fileName.MatchString(span) {
			names := strings.FieldsFunc(span, func(r rune) bool { return r == '.' || r == '[' || r == ']' })
			for _, name := range names {
				if words[names[0]] && !words[name] { // others have members, too
					return "no such member: " + name
				}
			}
		}
		path := span
		if strings.HasPrefix(span, "internal/") {
			path = "kvscore/cache/" + span
		}
		if _, err := fs.Stat(repository, path); ownPath.MatchString(path) && err != nil {
			return "no such file"
		}
		if goFile.MatchString(span) && !slices.ContainsFunc([]string{"*/", "*/*/", "*/*/*/"}, func(dir string) bool {
			found, _ := fs.Glob(repository, dir+span)
			return len(found) > 0
		}) {
			return "no such file in any folder"
		}
		if strings.Contains(code, span) {
			return ""
		}
		if m := ownOption.FindStringSubmatch(span); m != nil && !othersMessages.MatchString(span) {
			inSyntax, _ := regexp.MatchString(`\b`+m[2]+`\b`, syntax[m[1]])
			if !inSyntax && !slices.Contains(options, m[1]+" "+m[2]) {
				return "no such option or value"
			}
		} else if ownMessage.MatchString(span) && strings.Count(span, " ") > 2 && !othersMessages.MatchString(span) {
			return "no such text"
		}
		return ""
	}
	seen := 0
	for _, p := range append(mustPages(t), mustPage(t, "CHANGELOG.md")) {
		for span, line := range p.spans {
			seen++
			if why := problem(span); why != "" {
				t.Errorf("%s:%d: `%s`: %s", p.path, line, span, why)
			}
		}
	}
	if seen < 1000 {
		t.Errorf("%d spans: the test looks in the wrong place", seen)
	}
	for _, wrong := range []string{
		"kv_events_resyncs_total", "caddy_kv_router_nothing_total{a=\"b\"}", "worker has lost its KV cache", "X-KV-Nothing",
		"health.no_such_member", "handler/nothing.go", "nothing.go", "internal/nothing", "worker nothing", "policy nope",
	} {
		if problem(wrong) == "" {
			t.Errorf("`%s` passes", wrong)
		}
	}
}

// defaultsOf adds the values of a struct's fields by their names in JSON.
func defaultsOf(v reflect.Value, to map[string]any) {
	for v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	for i := range v.NumField() {
		f, field := v.Field(i), v.Type().Field(i)
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case f.Kind() == reflect.Struct || f.Kind() == reflect.Pointer && f.Type().Elem().Kind() == reflect.Struct && !f.IsNil():
			defaultsOf(f, to)
		case name != "" && name != "-" && field.IsExported():
			to[name] = f.Interface()
		}
	}
}

var documentedDefault = regexp.MustCompile("(?m)^- \\*\\*([^*]+)\\*\\*.* Default: `?([^`.,;\\s]+(?:\\.\\d+)?)`?")

// TestDefaultsAreDocumented compares the defaults that docs/configuration.md names with those of the code.
func TestDefaultsAreDocumented(t *testing.T) {
	inCode := make(map[string]any)
	defaultsOf(reflect.ValueOf(new(pool.Settings).WithDefaults()), inCode)
	var r resume.Config
	if err := r.Complete(); err != nil {
		t.Fatal(err)
	}
	defaultsOf(reflect.ValueOf(r), inCode)
	text, err := fs.ReadFile(repository, "docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, m := range documentedDefault.FindAllStringSubmatch(string(text), -1) {
		name := m[1][strings.LastIndex(m[1], " ")+1:]
		v, ok := inCode[name]
		if want, known := parsedDefault(m[2], v); ok && known {
			compared++
			if got := fmt.Sprint(v); got != want {
				t.Errorf("docs/configuration.md: %s: the default is %s, the page says %s", m[1], got, m[2])
			}
		}
	}
	if compared < 8 {
		t.Errorf("%d defaults are compared", compared)
	}
	if keys := strings.Join(plan.DefaultKeys, " "); !strings.Contains(string(text), "Default: `"+keys+"`") {
		t.Errorf("docs/configuration.md: the default of affinity key is %s", keys)
	}
	// Those of policies are in the tables of docs/routing.md.
	policies := map[string]any{"prefix_tokens": kvscore.DefaultPrefixTokens} // of the policy without options
	for _, m := range caddy.GetModules("http.handlers.kv_router.policies") {
		data, err := json.Marshal(m.New())
		if err == nil {
			err = json.Unmarshal(data, &policies)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	compared = 0
	for _, row := range mustPage(t, "docs/routing.md").rows {
		for _, name := range spans(row.cell("option")) {
			want := strings.NewReplacer("on", "true", "off", "false").Replace(row.cell("default"))
			if got := fmt.Sprint(policies[name]); got != want && !(policies[name] == nil && (want == "0" || want == "false")) {
				t.Errorf("docs/routing.md:%d: %s: the default is %s, the page says %s", row.line, name, got, want)
			}
			compared++
		}
	}
	if compared < 10 {
		t.Errorf("%d defaults of policies are compared", compared)
	}
}

// parsedDefault returns a default of the manual as fmt writes a value like v, and whether it is one.
func parsedDefault(text string, v any) (string, bool) {
	switch v.(type) {
	case caddy.Duration:
		d, err := time.ParseDuration(text)
		return fmt.Sprint(caddy.Duration(d)), err == nil
	case int, int64:
		if n, err := strconv.Atoi(text); err == nil {
			return strconv.Itoa(n), true
		}
		n, err := humanize.ParseBytes(text)
		return strconv.FormatUint(n, 10), err == nil
	}
	return "", false
}

// TestLabelsAreDocumented compares values that the code has as constants with the columns of tables.
func TestLabelsAreDocumented(t *testing.T) {
	c := mustCode(t)
	for _, v := range []struct{ page, column, below, pattern string }{
		{"docs/streams.md", "`way` in `resumed_total`", "handler/api", `\bWay[A-Z]\w* *= "(\w+)"`},
		{"docs/streams.md", "`reason`", "handler", `\bNotResumable[A-Z]\w* *= "(\w+)"`},
		{"docs/observability.md", "reason", "handler/dispatch", `\b[rR]eason[A-Z]\w* *= "(\w+)"`},
		{"docs/sessions.md", "state", "handler/turn", `\b[A-Z]\w* +State = "(\w+)"`},
		{"docs/sessions.md", "`reason`", "handler/dispatch", `\bmoved[A-Z]\w* *= "(\w+)"`},
		{"docs/commands.md", "state", "handler/admin", `\bstate[A-Z]\w* *= "([^"]+)"`},
		{"docs/commands.md", "anomaly", "handler/admin", `\banomaly[A-Z]\w* *= "([^"]+)"`},
	} {
		found := slices.Compact(slices.Sorted(maps.Keys(mustPage(t, v.page).column(v.column))))
		if inCode := c.all(v.below, v.pattern); len(inCode) < 3 || !slices.Equal(inCode, found) {
			t.Errorf("%s: the column %s has\n%v, the code\n%v", v.page, v.column, found, inCode)
		}
	}
	var text strings.Builder
	for _, p := range []string{"docs/observability.md"} {
		for span := range mustPage(t, p).spans {
			_, _ = text.WriteString(span + "\n")
		}
	}
	for _, name := range c.all("handler/attempt", `\bname: "(\w+)".*\bclient: true`) {
		header := "X-KV-" + strings.ReplaceAll(name, "_", "-")
		if !strings.Contains(strings.ToLower(text.String()), strings.ToLower(header)) {
			t.Errorf("docs/observability.md: the header %s is not documented", header)
		}
	}
	for _, name := range c.all("handler/attempt", `\baccess: "(\w+)"`) {
		if !strings.Contains(text.String(), name+"\n") {
			t.Errorf("docs/observability.md: the field %s of the access log is not documented", name)
		}
	}
}
