package tests

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/admin"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/prometheus/client_golang/prometheus"
)

const operations = "../handler/operations/"

// dashboard is the part of a Grafana dashboard that the tests look at.
type dashboard struct {
	SchemaVersion int
	Templating    struct {
		List []struct {
			Name, Type string
			Query      json.RawMessage
		}
	}
	Panels []panel
}

type panel struct {
	ID          int
	Type, Title string
	GridPos     struct{ H, W, X, Y int }
	Targets     []struct {
		RefID, Expr, LegendFormat string
		Datasource                struct{ Type, UID string }
	}
}

func readDashboard(t *testing.T) dashboard {
	t.Helper()
	data, err := os.ReadFile(operations + "dashboard.json")
	noError(t, err)
	var d dashboard
	noError(t, json.Unmarshal(data, &d))
	return d
}

// expressions are the dashboard's queries, by their panels' titles.
func (d dashboard) expressions() map[string][]string {
	all := make(map[string][]string)
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			all[p.Title] = append(all[p.Title], target.Expr)
		}
	}
	for _, v := range d.Templating.List {
		if v.Type == "query" {
			var q struct{ Query string }
			if json.Unmarshal(v.Query, &q) == nil {
				all["variable "+v.Name] = append(all["variable "+v.Name], q.Query)
			}
		}
	}
	return all
}

// TestDashboardIsWellFormed checks that the dashboard has what Grafana needs to draw it.
func TestDashboardIsWellFormed(t *testing.T) {
	d := readDashboard(t)
	if d.SchemaVersion < 39 {
		t.Errorf("schema version %d is older than Grafana 11's", d.SchemaVersion)
	}
	ids, drawn := make(map[int]bool), 0
	for _, p := range d.Panels {
		if ids[p.ID] || p.Title == "" || p.GridPos.W == 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %d %q: its id is taken, or it has no title or no place", p.ID, p.Title)
		}
		ids[p.ID] = true
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q shows nothing", p.Title)
		}
		refs := make(map[string]bool)
		for _, target := range p.Targets {
			drawn++
			if refs[target.RefID] || target.RefID == "" || target.Datasource.UID != "${datasource}" || target.Datasource.Type != "prometheus" {
				t.Errorf("panel %q: target %q has no name of its own, or another data source", p.Title, target.RefID)
			}
			refs[target.RefID] = true
			if !strings.Contains(target.Expr, `instance=~"$instance", pool=~"$pool"`) {
				t.Errorf("panel %q does not heed the variables: %s", p.Title, target.Expr)
			}
		}
	}
	if drawn < 30 {
		t.Errorf("%d queries are drawn", drawn)
	}
}

// scrapedLabels returns the label names of each metric of kv_router in a
// scrape.
func scrapedLabels(m metrics) map[string]map[string]bool {
	labels := make(map[string]map[string]bool)
	name := regexp.MustCompile(`[{,](\w+)="`)
	for series := range m {
		metric, rest, _ := strings.Cut(series, "{")
		if labels[metric] == nil {
			labels[metric] = make(map[string]bool)
		}
		for _, l := range name.FindAllStringSubmatch("{"+rest, -1) {
			labels[metric][l[1]] = true
		}
	}
	return labels
}

var descOf = regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{([^}]*)\}`)

// describe adds the metrics that only exist beside other engines, such as those of KV events.
func describe(labels map[string]map[string]bool) {
	descs := make(chan *prometheus.Desc, 1000)
	admin.Collector{}.Describe(descs)
	close(descs)
	for d := range descs {
		m := descOf.FindStringSubmatch(d.String())
		if labels[m[1]] == nil {
			labels[m[1]] = make(map[string]bool)
			for l := range strings.SplitSeq(m[2], ",") {
				labels[m[1]][l] = true
			}
		}
	}
}

var (
	selectorOf = regexp.MustCompile(`(caddy_\w+)(?:\{([^}]*)\})?`)
	matcherOf  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"`)
	groupingOf = regexp.MustCompile(`\b(?:by|on|ignoring|without)\s*\(([^)]*)\)`)
	legendOf   = regexp.MustCompile(`\{\{\s*(\w+)\s*\}\}`)
)

// badNames returns the metrics, labels and grouping labels of an expression that are not
// in the scrape.
func badNames(expr string, scraped map[string]map[string]bool) []string {
	var bad []string
	all := map[string]bool{"le": true, "job": true, "instance": true} // Prometheus adds the last two
	for _, sel := range selectorOf.FindAllStringSubmatch(expr, -1) {
		labels, there := scraped[sel[1]]
		if !there {
			bad = append(bad, "metric "+sel[1])
			continue
		}
		maps.Copy(all, labels)
		for _, m := range matcherOf.FindAllStringSubmatch(sel[2], -1) {
			if !labels[m[1]] && m[1] != "instance" && m[1] != "job" {
				bad = append(bad, "label "+m[1]+" of "+sel[1])
			}
		}
	}
	for _, g := range groupingOf.FindAllStringSubmatch(expr, -1) {
		for l := range strings.SplitSeq(g[1], ",") {
			if l = strings.TrimSpace(l); !all[l] {
				bad = append(bad, "label "+l+" that it groups by")
			}
		}
	}
	return bad
}

// badLegend returns labels of a legend that the query's result does not have.
func badLegend(expr, legend string) []string {
	var bad []string
	for _, l := range legendOf.FindAllStringSubmatch(legend, -1) {
		grouped := groupingOf.FindStringSubmatch(expr)
		if grouped == nil || !slices.Contains(strings.Split(strings.ReplaceAll(grouped[1], " ", ""), ","), l[1]) {
			bad = append(bad, l[1])
		}
	}
	return bad
}

// eventful returns the metrics of a Caddy that has had retries, fallbacks, streams and
// sessions, and has a shadow policy.
func eventful(t *testing.T) metrics {
	engines := startEngines(t, 2, canned.Pace{Words: 4})
	s := startCaddy(t, route(engines, "shadow random", "share "+startValkey(t).URL(), "class default {\nttft 1m\n}"))
	s.mustChat(t, ask("hello").streamed(), "X-Session-Id", "1")
	s.mustChat(t, ask("hello"))
	s.post(t.Context(), "/v1/chat/completions", []byte("{"))
	for _, e := range engines {
		e.SetFault(canned.Fault{Kind: canned.Status, Status: http.StatusServiceUnavailable, Body: `{}`})
	}
	s.chat(t.Context(), ask("hello"))
	return s.scrape(t)
}

// TestDashboardAndAlertsNameWhatIsThere compares all names in the dashboard and in the
// alert rules with the metrics of a Caddy that served requests.
func TestDashboardAndAlertsNameWhatIsThere(t *testing.T) {
	scraped := scrapedLabels(eventful(t))
	describe(scraped)
	d := readDashboard(t)
	for title, exprs := range d.expressions() {
		for _, expr := range exprs {
			if bad := badNames(expr, scraped); len(bad) > 0 {
				t.Errorf("panel %q: there is no %s\n%s", title, strings.Join(bad, ", no "), expr)
			}
		}
	}
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			if bad := badLegend(target.Expr, target.LegendFormat); len(bad) > 0 {
				t.Errorf("panel %q: its legend has %v, and the query does not", p.Title, bad)
			}
		}
	}
	rules, err := os.ReadFile(operations + "alerts.yml")
	noError(t, err)
	n := 0
	for rule := range strings.SplitSeq(string(rules), "- alert: ") {
		expr, text, found := strings.Cut(rule, "\n        labels:")
		if !found {
			continue
		}
		n++
		name, _, _ := strings.Cut(expr, "\n")
		if bad := badNames(expr, scraped); len(bad) > 0 {
			t.Errorf("alert %s: there is no %s", name, strings.Join(bad, ", no "))
		}
		for _, part := range []string{"severity: ", "summary: ", "description: >-"} {
			if !strings.Contains(text, part) {
				t.Errorf("alert %s has no %q", name, part)
			}
		}
		if !strings.Contains(expr, "increase(") && !strings.Contains(expr, "for: ") {
			t.Errorf("alert %s fires at once", name)
		}
	}
	if n < 12 {
		t.Errorf("%d alert rules were found", n)
	}
}

// TestDashboardIsPromQL checks the dashboard's queries with promtool, if it is installed.
func TestDashboardIsPromQL(t *testing.T) {
	tool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed")
	}
	rules := "groups:\n- name: dashboard\n  rules:\n"
	for title, exprs := range readDashboard(t).expressions() {
		for i, expr := range exprs {
			if !strings.HasPrefix(title, "variable ") {
				expr = strings.ReplaceAll(strings.ReplaceAll(expr, "$__rate_interval", "5m"), "'", "''")
				rules += fmt.Sprintf("  - record: q\n    labels: {panel: %q, n: \"%d\"}\n    expr: '%s'\n", title, i, expr)
			}
		}
	}
	file := filepath.Join(t.TempDir(), "dashboard.yml")
	noError(t, os.WriteFile(file, []byte(rules), 0o600))
	cmd := exec.CommandContext(t.Context(), tool, "check", "rules", file)
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool: %v\n%s", err, out)
	}
}
