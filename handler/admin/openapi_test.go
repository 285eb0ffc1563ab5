package admin

import (
	_ "embed"
	"encoding"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write docs/openapi.json")

const openAPIFile = "../../docs/openapi.json"

// operations are the operations of the API by method and path, with the values that they answer.
var operations = map[string]struct {
	answers any
	query   string // parameters
	does    string
}{
	"GET /kv_router/":                                       {nil, "", "The live page"},
	"GET /kv_router/ready":                                  {readyView{}, "pool", "Whether a worker can serve; 503 if none can"},
	"GET /kv_router/pools":                                  {[]poolView{}, "", "All pools"},
	"GET /kv_router/pools/{pool}":                           {poolView{}, "", "A pool"},
	"GET /kv_router/pools/{pool}/state":                     {stateView{}, "since", "A pool's workers and their last five minutes, in short"},
	"GET /kv_router/pools/{pool}/choices":                   {[]pastView{}, "request_id n", "Past choices"},
	"GET /kv_router/pools/{pool}/workers":                   {[]workerView{}, "", "A pool's workers"},
	"GET /kv_router/pools/{pool}/workers/{worker}":          {workerView{}, "", "A worker, by its address or id"},
	"POST /kv_router/pools/{pool}/workers/{worker}/drain":   {workerView{}, "move", "The worker gets no new requests"},
	"POST /kv_router/pools/{pool}/workers/{worker}/undrain": {workerView{}, "", "Ends a drain"},
	"GET /kv_router/pools/{pool}/sessions":                  {sessionPage{}, "after limit", "Bound sessions"},
	"GET /kv_router/pools/{pool}/sessions/{key}":            {sessionView{}, "hashed tenant scope model", "A session"},
	"PUT /kv_router/pools/{pool}/sessions/{key}":            {sessionView{}, "hashed tenant scope model worker rank", "Binds a session to another worker"},
	"DELETE /kv_router/pools/{pool}/sessions/{key}":         {sessionView{}, "hashed tenant scope model", "Unbinds a session"},
	"POST /kv_router/pools/{pool}/call":                     {[]called{}, "path worker", "Posts the body to a path of all workers, or of one"},
	"POST /kv_router/pools/{pool}/explain":                  {explanation{}, "path", "Where a request with this body would go"},
}

//go:embed testdata/fields.txt
var fields string

// meanings are the lines of fields.txt: what a field means, in one schema or in all. used are those that a field has.
var meanings, used = func() (map[string]string, map[string]bool) {
	of := make(map[string]string)
	for line := range strings.Lines(fields) {
		if name, text, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && name[0] != '#' {
			of[name] = text
		}
	}
	return of, make(map[string]bool)
}()

var undescribed, unnamed []string // fields without a line in fields.txt, or without a name of their own in JSON

// meaning returns what a schema's field means, "" if fields.txt does not say.
func meaning(schema, field string) string {
	for _, name := range []string{schema + "." + field, field} {
		if text := meanings[name]; text != "" {
			used[name] = true
			return text
		}
	}
	undescribed = append(undescribed, schema+"."+field)
	return ""
}

// schemas writes the types of answers as schemas.
type schemas map[string][]string // lines of properties, by name

// of returns the schema of a type.
func (s schemas) of(t reflect.Type) string {
	if t.Implements(reflect.TypeFor[encoding.TextMarshaler]()) || t == reflect.TypeFor[time.Time]() {
		return `{"type": "string"}`
	}
	if t == reflect.TypeFor[json.RawMessage]() {
		return `{"type": ["object", "array", "string"]}`
	}
	switch t.Kind() {
	case reflect.Pointer:
		return s.of(t.Elem())
	case reflect.Bool:
		return `{"type": "boolean"}`
	case reflect.String:
		return `{"type": "string"}`
	case reflect.Float64, reflect.Float32:
		return `{"type": "number"}`
	case reflect.Slice, reflect.Array:
		return `{"type": "array", "items": ` + s.of(t.Elem()) + `}`
	case reflect.Map:
		return `{"type": "object", "additionalProperties": ` + s.of(t.Elem()) + `}`
	case reflect.Struct:
		if _, known := s[t.Name()]; !known {
			s[t.Name()] = nil // a type may contain itself
			s[t.Name()] = s.properties(t.Name(), t)
		}
		return `{"$ref": "#/components/schemas/` + t.Name() + `"}`
	}
	return `{"type": "integer"}`
}

// properties returns those of a schema's struct and of what it embeds without a name.
func (s schemas) properties(schema string, t reflect.Type) (lines []string) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		of := f.Type
		if of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		switch {
		case f.Anonymous && name == "" && of.Kind() == reflect.Struct:
			lines = append(lines, s.properties(schema, of)...)
		case name == "" && f.IsExported():
			unnamed = append(unnamed, schema+"."+f.Name)
		case name != "" && name != "-" && f.IsExported():
			lines = append(lines, fmt.Sprintf("%q: %s, \"description\": %q}", name, strings.TrimSuffix(s.of(f.Type), "}"), meaning(schema, name)))
		}
	}
	return lines
}

// openAPI returns the description of the API.
func openAPI() string {
	all, paths := make(schemas), make(map[string][]string)
	for _, key := range slices.Sorted(maps.Keys(operations)) {
		op := operations[key]
		method, path, _ := strings.Cut(key, " ")
		var params []string
		for _, m := range regexp.MustCompile(`\{(\w+)\}`).FindAllStringSubmatch(path, -1) {
			params = append(params, fmt.Sprintf(`{"name": %q, "in": "path", "required": true, "schema": {"type": "string"}}`, m[1]))
		}
		for _, name := range strings.Fields(op.query) {
			params = append(params, fmt.Sprintf(`{"name": %q, "in": "query", "schema": {"type": "string"}}`, name))
		}
		content := `"text/html": {}`
		if op.answers != nil {
			content = `"application/json": {"schema": ` + all.of(reflect.TypeOf(op.answers)) + `}`
		}
		body := ""
		if strings.HasSuffix(path, "/explain") {
			body = `, "requestBody": {"content": {"application/json": {}}}`
		}
		paths[path] = append(paths[path], fmt.Sprintf("%q: {\"summary\": %q, \"parameters\": [%s]%s,\n"+
			"        \"responses\": {\"200\": {\"description\": \"OK\", \"content\": {%s}}, \"default\": {\"$ref\": \"#/components/responses/error\"}}}",
			strings.ToLower(method), op.does, strings.Join(params, ", "), body, content))
	}
	object := func(indent string, m map[string][]string) string {
		var parts []string
		for _, name := range slices.Sorted(maps.Keys(m)) {
			parts = append(parts, fmt.Sprintf("%s%q: {\n%s  %s\n%s}", indent, name, indent, strings.Join(m[name], ",\n"+indent+"  "), indent))
		}
		return strings.Join(parts, ",\n")
	}
	for name, lines := range all {
		all[name] = []string{`"type": "object", "properties": {` + "\n        " + strings.Join(lines, ",\n        ") + "\n      }"}
	}
	return "{\n  \"openapi\": \"3.1.0\",\n  \"info\": {\"title\": \"kv_router's part of Caddy's admin API\", \"version\": \"1\"},\n  \"servers\": [{\"url\": \"http://localhost:2019\"}],\n" +
		"  \"paths\": {\n" + object("    ", paths) + "\n  },\n  \"components\": {\n" +
		`    "responses": {"error": {"description": "An error", "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}}}},` +
		"\n    \"schemas\": {\n" + object("      ", all) + "\n    }\n  }\n}\n"
}

// TestOpenAPIIsTheAPI compares the operations with the routes, and the file with the types of the
// answers. -update writes the file.
func TestOpenAPIIsTheAPI(t *testing.T) {
	var routes []string
	for _, r := range (Admin{}).Routes() {
		path := strings.TrimSuffix(r.Pattern, "{$}")
		if m, ok := r.Handler.(methods); ok {
			for method := range m {
				routes = append(routes, method+" "+path)
			}
		} else if path != r.Pattern {
			routes = append(routes, http.MethodGet+" "+path)
		}
	}
	slices.Sort(routes)
	if known := slices.Sorted(maps.Keys(operations)); !slices.Equal(routes, known) {
		t.Errorf("the routes are\n%s\nand the operations\n%s", strings.Join(routes, "\n"), strings.Join(known, "\n"))
	}
	want := openAPI()
	if !json.Valid([]byte(want)) {
		t.Fatalf("no JSON:\n%s", want)
	}
	if len(undescribed) > 0 {
		t.Errorf("these fields have no line in testdata/fields.txt: %s", undescribed)
	}
	if len(unnamed) > 0 {
		t.Errorf("these fields have no name in JSON: %s", unnamed)
	}
	for name := range meanings {
		if !used[name] {
			t.Errorf("testdata/fields.txt describes %s, which no answer has", name)
		}
	}
	if *update {
		if err := os.WriteFile(openAPIFile, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(openAPIFile); err != nil || string(got) != want {
		t.Errorf("docs/openapi.json is not what the handlers answer: run go test ./handler/admin -run OpenAPI -update (%v)", err)
	}
}
