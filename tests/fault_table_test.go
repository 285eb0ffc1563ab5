package tests

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// faultRow is one fault: what strikes which engines, and what must come of it.
type faultRow struct {
	name string
	// block are the lines of kv_router's block; without any, all is default.
	block []string
	// proxy are those of its reverse_proxy block.
	proxy []string
	// site starts what the site needs, the engines too, and returns the whole
	// directive. Default: four engines, and what block and proxy say.
	site func(r *faultRun) string
	// struck is how many of the four engines the fault strikes. Default: 1.
	struck int
	// lasts is for how long. Default: 1 s, and 3 s in the long form.
	lasts time.Duration
	// strike begins the fault on one engine, and returns what ends it.
	strike func(r *faultRun, e *canned.Engine) (end func())
	// pace is the engines'.
	pace canned.Pace
	// clients changes the manners of the clients.
	clients func(r *faultRun)
	// retried is the reason of the retries: there must be some. Further reasons
	// may be there, and no others. Empty: there must be none. "any": whatever.
	retried string
	// marked says that the worker is marked down, unmarked that it must not be;
	// unmarkedInFault: not before the fault ends.
	marked, unmarked, unmarkedInFault bool
	// long is for rows that are only in the long form.
	long bool
	// allowed are the fates beside served that requests may have. All others
	// must not be.
	allowed []fate
	// check looks at the rest.
	check func(t *testing.T, r *faultRun)
}

// faultRun is a run of a row.
type faultRun struct {
	row     *faultRow
	t       *testing.T
	s       *server
	pace    canned.Pace
	dns     *dnsServer
	engines []*canned.Engine
	dials   []string // under which the engines are known; nil: their addresses
	load    *load
	// met counts the requests that the fault's handler met.
	met atomic.Int64

	struckAt, endedAt, backAt time.Time
	struckBy                  time.Time // when all were struck
	was                       int       // requests that the struck engines had received before
	before, after             metrics
	visits                    []visit
	n                         [fates]int
	sent                      int
	retries                   map[string]float64 // by reason
	attempts                  int                // at the struck engines during the fault
	moved                     time.Duration      // until the first mark; -1 without
	worst                     time.Duration      // wait of requests that were served
	worstFailed               time.Duration      // and that failed
}

const faultClients = 32

// faultPace makes an answer last about 0.1 s.
var faultPace = canned.Pace{Words: 20, FirstToken: 20 * time.Millisecond, PerWord: 4 * time.Millisecond}

// TestFaultTable lets 32 clients hold streamed conversations through four
// engines with default settings, and faults strike in the middle of it. What it
// logs is the table of counts in docs/reliability.md.
func TestFaultTable(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute")
	}
	var lines []string
	for i := range faultRows {
		row := &faultRows[i]
		if row.long && !inLong {
			continue
		}
		t.Run(strings.ReplaceAll(row.name, " ", "_"), func(t *testing.T) {
			r := &faultRun{row: row, t: t}
			r.play()
			r.judge()
			lines = append(lines, r.line())
			t.Log(r.line())
		})
	}
	t.Logf("the table:\n%s\n%s", faultHead, strings.Join(lines, "\n"))
}

const faultHead = "| fault | sent | served | retried | failed | broken | left | attempts there | marked down after | longest wait | back after |\n|---|---|---|---|---|---|---|---|---|---|---|"

// line returns the row of the table.
func (r *faultRun) line() string {
	ms := func(d time.Duration) string {
		if d < 0 {
			return "-"
		}
		return d.Round(time.Millisecond).String()
	}
	var retried []string
	for reason, n := range r.retries {
		retried = append(retried, fmt.Sprintf("%v %s", n, reason))
	}
	if len(retried) == 0 {
		retried = []string{"0"}
	}
	notServed := fmt.Sprint(r.n[failed])
	if r.n[strange] > 0 {
		notServed += fmt.Sprintf(" (%d strange)", r.n[strange])
	}
	return fmt.Sprintf("| %s | %d | %d | %s | %s | %d | %d | %d | %s | %s | %s |", r.row.name, r.sent, r.n[served], strings.Join(retried, ", "),
		notServed, r.n[broken], r.n[left], r.attempts, ms(r.moved), ms(r.worst), ms(r.backAt.Sub(r.endedAt)))
}

// directive returns the row's site.
func (r *faultRun) directive() string {
	if r.row.site != nil {
		return r.row.site(r)
	}
	r.engines = startEngines(r.t, 4, r.pace)
	up := strings.TrimPrefix(route(r.engines), "kv_router ")
	return fmt.Sprintf("kv_router {\n%s\nreverse_proxy %s {\n%s\n}\n}", strings.Join(r.row.block, "\n"), up, strings.Join(r.row.proxy, "\n"))
}

// dial returns the address under which the ith engine is known.
func (r *faultRun) dial(i int) string {
	if r.dials != nil {
		return r.dials[i]
	}
	return r.engines[i].Addr()
}

// struck returns the engines that the fault strikes.
func (r *faultRun) struck() []*canned.Engine { return r.engines[:max(r.row.struck, 1)] }

// play runs the load, with the fault in its middle.
func (r *faultRun) play() {
	t, row := r.t, r.row
	if r.pace = row.pace; r.pace == (canned.Pace{}) {
		r.pace = faultPace
	}
	r.s = startCaddy(t, r.directive())
	eventually(t, 5*time.Second, "the metrics", func() bool { r.before = r.s.scrape(t); return r.before != nil })
	goroutines := runtime.NumGoroutine()

	r.load = &load{s: r.s}
	if row.clients != nil {
		row.clients(r)
	}
	r.load.start(t.Context(), faultClients)
	time.Sleep(span(600*time.Millisecond, time.Second))
	r.struckAt = time.Now()
	r.was = r.received()
	var ends []func()
	for _, e := range r.struck() {
		ends = append(ends, row.strike(r, e))
	}
	r.struckBy = time.Now()
	lasts := row.lasts
	if lasts == 0 {
		lasts = span(time.Second, 3*time.Second)
	}
	time.Sleep(time.Until(r.struckAt.Add(lasts)))
	r.endedAt = time.Now()
	r.attempts = r.received() - r.was
	if m := r.s.scrape(t); m != nil {
		for i := range r.struck() {
			labels := []string{fmt.Sprintf("worker=%q", r.dial(i)), `reason="refused"`}
			r.attempts += int(m.value(retriesTotal, labels...) - r.before.value(retriesTotal, labels...))
		}
	}
	for _, end := range ends {
		end()
	}
	r.awaitReturn()
	time.Sleep(span(300*time.Millisecond, time.Second))
	if !r.load.stop(5 * time.Second) {
		t.Error("requests hang after the fault")
	}
	r.collect()
	r.s.client.CloseIdleConnections()
	for _, e := range r.engines {
		e.Kill()
	}
	eventually(t, 5*time.Second, "goroutines as before", func() bool { return runtime.NumGoroutine() <= goroutines+4 })
}

// received returns how many requests the struck engines have received.
func (r *faultRun) received() int {
	n := 0
	for _, e := range r.struck() {
		n += e.Requests()
	}
	return n
}

// awaitReturn waits until each struck engine serves again.
func (r *faultRun) awaitReturn() {
	for _, e := range r.struck() {
		eventually(r.t, 15*time.Second, "the engine serves again", func() bool {
			for _, v := range r.load.all() {
				if v.engine == e.Name() && v.fate == served && v.begun.After(r.endedAt) {
					return true
				}
			}
			return false
		})
	}
	r.backAt = time.Now()
}

// collect counts what became of all.
func (r *faultRun) collect() {
	r.s.booksAtZero(r.t)
	r.after = r.s.scrape(r.t)
	r.visits = r.load.all()
	r.sent = len(r.visits)
	for _, v := range r.visits {
		r.n[v.fate]++
		switch {
		case v.ended.Before(r.struckAt) || v.begun.After(r.endedAt):
		case v.fate == served:
			r.worst = max(r.worst, v.wait())
		case v.fate == failed:
			r.worstFailed = max(r.worstFailed, v.wait())
		}
	}
	r.retries = make(map[string]float64)
	for _, reason := range []string{"refused", "broken", "429", "503", "529", "first_token", "hung"} {
		label := fmt.Sprintf("reason=%q", reason)
		if n := r.after.value(retriesTotal, label) - r.before.value(retriesTotal, label); n > 0 {
			r.retries[reason] = n
		}
	}
	r.moved = -1
	for i := range r.struck() {
		if at, ok := r.s.markedDownAt(r.t, r.dial(i), r.struckAt); ok && (r.moved < 0 || at.Sub(r.struckAt) < r.moved) {
			r.moved = at.Sub(r.struckAt)
		}
	}
}

// markedDownAt returns when the log first says so of a worker, after a time, for
// whatever reason.
func (s *server) markedDownAt(t testing.TB, dial string, after time.Time) (time.Time, bool) {
	data, err := os.ReadFile(s.log)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		var entry struct {
			TS       float64 `json:"ts"`
			Msg      string  `json:"msg"`
			Upstream string  `json:"upstream"`
		}
		if !strings.Contains(line, "marked down") || json.Unmarshal([]byte(line), &entry) != nil || entry.Upstream != dial {
			continue
		}
		if at := time.UnixMicro(int64(entry.TS * 1e6)); at.After(after.Add(-time.Millisecond)) {
			return at, true
		}
	}
	return time.Time{}, false
}

// counted returns how many requests the router counted with an outcome.
func (r *faultRun) counted(outcome string) int {
	label := fmt.Sprintf("outcome=%q", outcome)
	return int(r.after.value(requestsTotal, label) - r.before.value(requestsTotal, label))
}

// judge compares the run with what must come of the row.
func (r *faultRun) judge() {
	t, row := r.t, r.row
	for f := failed; f < fates; f++ {
		if n := r.n[f]; n > 0 && !slices.Contains(row.allowed, f) {
			t.Errorf("%d requests %v, the first: %s", n, f, r.firstOf(f))
		}
	}
	r.judgeRetries()
	switch {
	case row.unmarkedInFault && r.moved >= 0 && r.moved < r.endedAt.Sub(r.struckAt):
		t.Errorf("the worker was marked down after %v", r.moved)
	case row.marked && r.moved < 0:
		t.Error("the worker was not marked down")
	case row.unmarked && r.moved >= 0:
		t.Errorf("the worker was marked down after %v", r.moved)
	}
	r.judgeCounters()
	if row.check != nil {
		row.check(t, r)
	}
}

func (r *faultRun) judgeRetries() {
	if r.row.retried == "any" {
		return
	}
	reasons := strings.Fields(r.row.retried)
	if len(reasons) > 0 && r.retries[reasons[0]] == 0 {
		r.t.Errorf("retries %v, want some for the reason %s", r.retries, reasons[0])
	}
	for reason, n := range r.retries {
		if !slices.Contains(reasons, reason) {
			r.t.Errorf("%v retries for the reason %s, want none", n, reason)
		}
	}
}

// judgeCounters holds the router's counts against the clients'.
func (r *faultRun) judgeCounters() {
	all := int(r.after.value(requestsTotal) - r.before.value(requestsTotal))
	if all > r.sent || all < r.sent-r.n[left] { // who leaves at once may not have been heard
		r.t.Errorf("the router counted %d requests, the clients sent %d", all, r.sent)
	}
	if r.n[left] > 0 {
		return // one may leave when all of its answer is on its way
	}
	for _, c := range []struct {
		what      string
		got, want int
	}{
		{"served", r.counted("ok"), r.n[served]},
		{"failed", r.counted("engine_error") + r.counted("unavailable"), r.n[failed] + r.n[strange]},
		{"broken", r.counted("broken"), r.n[broken]},
		{"left", r.counted("client_gone"), 0},
	} {
		if c.got != c.want {
			r.t.Errorf("%s: the router counted %d, the clients %d", c.what, c.got, c.want)
		}
	}
}

func (r *faultRun) firstOf(f fate) string {
	for _, v := range r.visits {
		if v.fate == f {
			return fmt.Sprintf("client %d, session %q, by %q after %v, status %d, error %v, body %.200q", v.client, v.session, v.engine,
				v.ended.Sub(v.begun).Round(time.Millisecond), v.status, v.err, v.body)
		}
	}
	return "none"
}

// inFault returns how many requests were begun during the fault and had a fate.
func (r *faultRun) inFault(f fate) int {
	n := 0
	for _, v := range r.visits {
		if v.fate == f && v.begun.After(r.struckAt) && v.begun.Before(r.endedAt) {
			n++
		}
	}
	return n
}

// handle lets the engines answer with h, until the end. over is closed then.
func handle(h func(w http.ResponseWriter, r *http.Request, over <-chan struct{})) func(*faultRun, *canned.Engine) func() {
	return func(run *faultRun, e *canned.Engine) func() {
		over := make(chan struct{})
		e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
			run.met.Add(1)
			h(w, r, over)
		})
		return func() {
			e.SetHandler(nil)
			close(over)
		}
	}
}
