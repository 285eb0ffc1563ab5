package manual

import (
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/caddyserver/caddy/v2"
)

// pageOf reads a page from its text.
func pageOf(t *testing.T, text string) *page {
	t.Helper()
	p, err := readPage(fstest.MapFS{"a.md": {Data: []byte(text)}}, "a.md")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// sample is a program with one of each thing that the checks look for.
const sample = `package sample

const (
	CodeOne = "one"
	CodeTwo = "two"
	other   = "three"
)

const incidentFull = "all are full"

var errNone = errors.New("none is there")

func (h *H) options() options {
	return options{
		"pool": &h.Pool,
		"index": func(d *D) error {
			return options{"memory": &h.Memory, "size": &h.Size}.readBlock(d, "index option")
		},
	}
}

func (p *P) read(d *D) error { return options{"preset": &p.Preset}.readBlock(d, "option of policy dynamo") }

func (d *D) placeholder(key string) (any, bool) {
	switch {
	case name == "session":
		return nil, true
	}
	switch name {
	case "worker", "reason":
		return nil, true
	}
	return nil, false
}

func (p *P) log(name string, n int) {
	p.logger.Info("not of interest")
	p.logger.Warn("first line", zap.Int("n", n))
	p.Logger().Error("second line: " + name)
	if c := p.logger.Check(zap.WarnLevel, "third line"); c != nil {
		c.Write()
	}
	if c := p.logger.Check(zap.DebugLevel, "not of interest"); c != nil {
		c.Write()
	}
	_ = caddyhttp.Error(http.StatusTeapot, errNone)
	p.Incidents.Raise(now, incidentFull, p.Logger)
	p.turn("too many wait")
	p.turn("it waits too long")
	incident := errNone.Error()
	if n > 0 {
		incident = "another is there"
	}
	p.Incidents.Raise(now, incident, p.Logger)
}

func (p *P) turn(text string) { p.Incidents.Raise(now, text, p.Logger) }
`

func sampleCode(t *testing.T) *code {
	t.Helper()
	c, err := readCode(fstest.MapFS{"sample/sample.go": {Data: []byte(sample)}}, "sample")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestCodeIsRead checks what the checks find in the code.
func TestCodeIsRead(t *testing.T) {
	c := sampleCode(t)
	lines, conditions := c.messages()
	for _, v := range []struct {
		name      string
		got, want []string
	}{
		{"Options", c.options(), []string{"index", "index memory", "index size", "policy dynamo preset", "pool"}},
		{"Codes", c.constants("sample", regexp.MustCompile("^Code")), []string{"one", "two"}},
		{"Placeholders", c.placeholders(), []string{"reason", "session", "worker"}},
		{"Lines", lines, []string{"first line", "second line: " + anything, "third line"}},
		{"Conditions", conditions, []string{"all are full", "another is there", "it waits too long", "none is there", "too many wait"}},
	} {
		if !slices.Equal(v.got, v.want) {
			t.Errorf("%s: found %q, want %q", v.name, v.got, v.want)
		}
	}
}

func TestUndocumentedOptionsAreFound(t *testing.T) {
	p := pageOf(t, "```caddy-syntax\nkv_router [<matcher>] {\n\tpool <name>\n\tindex {\n\t\tmemory <size>\n\t\tgone\n\t}\n}\n```\n"+
		"- **pool** is the name.\n- **index memory** is the size.\n")
	wantFindings(t, checkOptions(p, sampleCode(t).options()),
		"a.md: option index size is not described", "a.md: option index size is not documented", "a.md:6: option index gone is not in the code")
}

func TestUndocumentedFieldsAreFound(t *testing.T) {
	type nested struct {
		A int `json:"a,omitempty"`
		B int `json:"b"`
	}
	type config struct {
		Pool   string         `json:"pool,omitempty"`
		List   []*nested      `json:"list,omitempty"`
		TTL    caddy.Duration `json:"ttl"`
		Hidden int            `json:"-"`
		hidden int
	}
	_ = config{}.hidden
	p := pageOf(t, "| JSON | Caddyfile |\n|---|---|\n| `pool`, `gone` | the same |\n| `list[]`: `a` | |\n")
	fields := jsonFields(reflect.TypeFor[config](), "")
	if want := []string{"pool", "list[].a", "list[].b", "ttl"}; !slices.Equal(fields, want) {
		t.Errorf("found the fields %q, want %q", fields, want)
	}
	wantFindings(t, compare(p.path, "JSON field", fields, tableFields(p)),
		"a.md: JSON field list[].b is not", "a.md: JSON field ttl is not", "a.md:3: JSON field gone is not")
}

func TestUndocumentedMetricsAreFound(t *testing.T) {
	p := pageOf(t, "| metric | labels |\n|---|---|\n| `one_total` | |\n| `two_total` | `worker` |\n| `gone` | |\n")
	wantFindings(t, checkMetrics(p, map[string][]string{"one_total": {"pool"}, "two_total": {"pool", "worker", "reason"}, "three": {"pool"}}),
		"a.md:4: metric two_total has the labels [reason worker]", "a.md: metric three is not documented", "a.md:5: metric gone is not in the code")
}

func TestUndocumentedCodesAreFound(t *testing.T) {
	p := pageOf(t, "| status | code |\n|---|---|\n| 400 | `one` |\n| 500 | `gone` |\n")
	wantFindings(t, compare(p.path, "error code", sampleCode(t).constants("sample", regexp.MustCompile("^Code")), p.column("code")),
		"a.md: error code two is not documented", "a.md:4: error code gone is not in the code")
}

func TestUndocumentedPlaceholdersAreFound(t *testing.T) {
	p := pageOf(t, "| placeholder | value |\n|---|---|\n| `{http.kv_router.worker}` | |\n| `{http.kv_router.session}` | |\n| `{http.kv_router.gone}` | |\n")
	wantFindings(t, checkPlaceholders(p, sampleCode(t).placeholders()),
		"a.md: placeholder reason is not documented", "a.md:5: placeholder gone is not in the code")
}

func TestUndocumentedMessagesAreFound(t *testing.T) {
	lines, conditions := sampleCode(t).messages()
	p := pageOf(t, "## Lines\n| log line | what to do |\n|---|---|\n| `first line` | |\n| `second line: <name>` | |\n| `gone` | |\n\n"+
		"## Conditions\n| condition | what to do |\n|---|---|\n| `"+strings.Join(conditions[1:], "` | |\n| `")+"` | |\n| `first line` | |\n")
	wantFindings(t, append(checkMessages(p, "log line", "log line", lines), checkMessages(p, "condition", "condition", conditions)...),
		`a.md: log line "third line" is not`, `a.md:6: log line "gone" is not`,
		`a.md: condition "all are full" is not`, `a.md:15: condition "first line" is not`)
}
