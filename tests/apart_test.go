package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestBadWorkersAreFound has a slow, a failing and a cold engine among eight. It looks for them as the
// manual says: by the command and on the page. If KVROUTER_ALERTS is set, it also looks on the dashboard
// and at the alerts. A Prometheus then scrapes Caddy, with all times of the rules divided by that number: 20
// takes two minutes, 1 takes forty.
func TestBadWorkersAreFound(t *testing.T) {
	takesSeconds(t)
	scale, _ := strconv.Atoi(os.Getenv("KVROUTER_ALERTS"))
	if _, err := exec.LookPath("prometheus"); scale > 0 && err != nil {
		t.Skip("KVROUTER_ALERTS needs prometheus in the PATH")
	}
	s, addrs, bad := serveBadly(t)
	var p *scraper
	if scale > 0 {
		p = watch(t, s.admin, scale)
	}
	checkStatus(t, s, bad)
	checkPage(t, s, addrs, bad)
	if p != nil {
		p.check(t, bad, scale)
	}
}

// serveBadly has eight engines serve conversations until the test ends. Three of them are bad.
func serveBadly(t *testing.T) (s *server, addrs []string, bad signsOf) {
	t.Helper()
	engines := make([]*engine.Engine, 8)
	for i := range engines {
		e, err := engine.Start(engine.Config{Name: fmt.Sprintf("e%d", i+1), Speed: 2, AnswerTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		engines[i], addrs = e, append(addrs, e.Addr())
	}
	s = startCaddy(t, "kv_router_status /status\nkv_router "+strings.Join(addrs, " "))
	if err := engines[2].SetFault(engine.Fault{Kind: engine.Slow, Factor: 5}); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	var all sync.WaitGroup
	t.Cleanup(all.Wait)
	all.Go(func() { // half of the requests fail, and the cache is cleared whenever nothing runs
		for n := 0; ctx.Err() == nil; n++ {
			f := engine.Fault{}
			if n%20 < 10 {
				f = engine.Fault{Kind: engine.Status, Status: 500}
			}
			engines[4].SetFault(f) //nolint:errcheck // it is valid
			if resp, err := http.Post(engines[6].URL()+engine.ResetPath, "", nil); err == nil {
				resp.Body.Close()
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
	for i := range 60 {
		all.Go(func() { talkOn(ctx, s, rand.New(rand.NewPCG(7, uint64(i)))) })
	}
	return s, addrs, signsOf{addrs[2]: "slow", addrs[4]: "failing", addrs[6]: "cold"}
}

// checkStatus waits until the command shows the bad workers.
func checkStatus(t *testing.T, s *server, bad signsOf) {
	t.Helper()
	row := regexp.MustCompile(`(?m)^(127\.0\.0\.1:\d+) +(\S.*?)  ?sim-8b`)
	for deadline := time.Now().Add(40 * time.Second); ; time.Sleep(time.Second) {
		signs := make(signsOf)
		code, out := kvRouter(t, "status", "--address", s.admin)
		for _, m := range row.FindAllStringSubmatch(out, -1) {
			signs.add(m[1], m[2])
		}
		found := maps.Equal(signs, bad) && code == 2
		if !found && time.Now().Before(deadline) {
			continue
		}
		if t.Logf("caddy kv-router status:\n%s", out); !found {
			t.Fatalf("status: code %d, shows %v, want %v", code, signs, bad)
		}
		return
	}
}

// checkPage waits until the page shows the bad workers, if there is a Chromium.
func checkPage(t *testing.T, s *server, addrs []string, bad signsOf) {
	t.Helper()
	signs := make(signsOf)
	for try := 0; !maps.Equal(signs, bad); try++ { // the signs are of the last minutes, and change
		dom := shown(t, s.url+"/status")
		if dom == "" {
			return
		}
		clear(signs)
		for _, addr := range addrs {
			signs.add(addr, regexp.MustCompile(`(?s)`+regexp.QuoteMeta(addr)+`</th>.*?</tr>`).FindString(dom))
		}
		if t.Logf("the page: %v", signs); try == 3 {
			t.Fatalf("the page shows %v, want %v", signs, bad)
		}
	}
}

// signsOf are the signs of workers, by address.
type signsOf map[string]string

// add adds the signs that a text names.
func (s signsOf) add(addr, text string) {
	for _, sign := range []string{"slow", "failing", "cold"} {
		if strings.Contains(text, sign) {
			s[addr] += sign
		}
	}
}

// talkOn talks with one conversation after the other. Each has a long beginning, and a few turns.
func talkOn(ctx context.Context, s *server, rnd *rand.Rand) {
	for ctx.Err() == nil {
		c := chat{Model: "sim-8b", Stream: true, MaxTokens: 16, StreamOptions: json.RawMessage(`{"include_usage":true}`)}
		c.Messages = []message{{"user", prose(rnd, 6000, 6000)}}
		for turn := 0; turn < 5 && ctx.Err() == nil; turn++ {
			a := s.chat(ctx, c)
			if !a.ok() { // try again
				time.Sleep(50 * time.Millisecond)
				continue
			}
			c.Messages = append(c.Messages, message{"assistant", a.text}, message{"user", prose(rnd, 300, 300)})
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// shown returns what Chromium makes of a page, and nothing if there is no Chromium.
func shown(t testing.TB, address string) string {
	t.Helper()
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		return ""
	}
	out, err := exec.CommandContext(t.Context(), chromium, "--headless=new", "--no-sandbox", "--disable-gpu", //nolint:gosec // found above
		"--user-data-dir="+t.TempDir(), "--virtual-time-budget=2500", "--dump-dom", address).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// scraper is a Prometheus that scrapes a Caddy and evaluates the rules of operations.
type scraper struct{ url string }

// times are the minutes in a rule or a panel.
var times = regexp.MustCompile(`\b(\d+)m\b`)

// scaled divides all times in a text by scale. They are then in seconds, and at least one.
func scaled(text string, scale int) string {
	return times.ReplaceAllStringFunc(text, func(m string) string {
		minutes, _ := strconv.Atoi(strings.TrimSuffix(m, "m"))
		return fmt.Sprintf("%ds", max(1, minutes*60/scale))
	})
}

func watch(t *testing.T, target string, scale int) *scraper {
	t.Helper()
	rules, err := os.ReadFile(operations + "alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	few := strings.ReplaceAll(string(rules), " > 10\n", fmt.Sprintf(" > %g\n", 10/float64(scale))) // answers in a shorter time
	dir, addr := t.TempDir(), freeAddr(t)
	every := max(250*time.Millisecond, 10*time.Second/time.Duration(scale))
	write(t, filepath.Join(dir, "alerts.yml"), scaled(few, scale))
	write(t, filepath.Join(dir, "prometheus.yml"), fmt.Sprintf("global: {scrape_interval: %v, scrape_timeout: %[1]v, evaluation_interval: %[1]v}\n"+
		"rule_files: [alerts.yml]\nscrape_configs: [{job_name: caddy, static_configs: [{targets: [%q]}]}]\n", every, target))
	cmd := exec.Command("prometheus", "--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+addr, "--log.level=warn")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait() //nolint:errcheck // it was killed
	})
	return &scraper{"http://" + addr}
}

// get reads an answer of Prometheus. It returns whether there was one.
func (p *scraper) get(t *testing.T, path string, v any) bool {
	t.Helper()
	resp, err := http.Get(p.url + path)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: status %d", path, resp.StatusCode)
	}
	return json.NewDecoder(resp.Body).Decode(v) == nil
}

// signAlerts are the alerts for one worker, and the panels that show it.
var signAlerts = map[string]struct {
	alerts []string
	panel  string
	lowest bool // on the panel; else it is the highest
}{
	"slow":    {[]string{"KvRouterWorkerSlow"}, "Slowness, and error of predicted times", false},
	"failing": {[]string{"KvRouterWorkerFails", "KvRouterWorkerErrors"}, "Failed attempts, by worker", false},
	"cold":    {[]string{"KvRouterWorkerCold"}, "Hit ratio, reported, by worker", true},
}

func (p *scraper) check(t *testing.T, bad signsOf, scale int) {
	t.Helper()
	want := make(map[string][]string)
	for addr, sign := range bad {
		want[addr] = signAlerts[sign].alerts[:1]
	}
	var firing map[string][]string
	deadline := time.Now().Add(45*time.Minute/time.Duration(scale) + 10*time.Second)
	for complete := false; !complete && time.Now().Before(deadline); time.Sleep(time.Second) {
		var v struct {
			Data struct {
				Alerts []struct {
					State  string            `json:"state"`
					Labels map[string]string `json:"labels"`
				} `json:"alerts"`
			} `json:"data"`
		}
		p.get(t, "/api/v1/alerts", &v)
		firing = make(map[string][]string)
		for _, a := range v.Data.Alerts {
			if a.State == "firing" {
				firing[a.Labels["worker"]] = append(firing[a.Labels["worker"]], a.Labels["alertname"])
			}
		}
		complete = true
		for addr, alerts := range want {
			complete = complete && slices.Contains(firing[addr], alerts[0])
		}
	}
	t.Logf("firing: %v", firing)
	for addr, sign := range bad {
		if !slices.Contains(firing[addr], signAlerts[sign].alerts[0]) {
			t.Errorf("no alert %s for %s", signAlerts[sign].alerts[0], addr)
		}
	}
	for addr, alerts := range firing {
		for sign, of := range signAlerts {
			if bad[addr] != sign && slices.ContainsFunc(alerts, func(a string) bool { return slices.Contains(of.alerts, a) }) {
				t.Errorf("%s is %q, and the alerts are %v", addr, bad[addr], alerts)
			}
		}
	}
	p.checkDashboard(t, bad, scale)
}

func (p *scraper) checkDashboard(t *testing.T, bad signsOf, scale int) {
	t.Helper()
	variables := strings.NewReplacer("$__rate_interval", scaled("5m", scale), "$instance", ".*", "$pool", ".*", "$worker", ".*")
	panels := readDashboard(t).expressions()
	for addr, sign := range bad {
		var v struct {
			Data struct {
				Result []struct {
					Metric map[string]string `json:"metric"`
					Value  [2]any            `json:"value"`
				} `json:"result"`
			} `json:"data"`
		}
		of := signAlerts[sign]
		over := "max_over_time" // a line's last minutes; NaN while there are no answers
		if of.lowest {
			over = "min_over_time"
		}
		query := fmt.Sprintf("%s((%s)[2m:2s])", over, variables.Replace(panels[of.panel][0]))
		p.get(t, "/api/v1/query?query="+url.QueryEscape(query), &v)
		own, others := math.NaN(), []float64(nil)
		for _, r := range v.Data.Result {
			f, _ := strconv.ParseFloat(fmt.Sprint(r.Value[1]), 64)
			if r.Metric["worker"] == addr {
				own = f
			} else if bad[r.Metric["worker"]] == "" {
				others = append(others, f)
			}
		}
		slices.Sort(others)
		t.Logf("%s: %s has %.3g, the others %.3g", of.panel, addr, own, others)
		if n := len(others); n != 5 || of.lowest && !(own < others[0]) || !of.lowest && !(own > others[n-1]) {
			t.Errorf("%s does not show %s apart", of.panel, addr)
		}
	}
}
