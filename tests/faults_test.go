package tests

import (
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// faultRow is one fault: which engines it affects, and the expected result.
type faultRow struct {
	name string
	// block are the lines of kv_router's block; without any, all is default.
	block string
	// site starts the engines, and returns the whole directive. Default: four engines and block.
	site func(r *faultRun) string
	// struck is how many of the four engines the fault strikes. Default: 1.
	struck int
	// lasts is for how long at least. Default: 0.8 s, and 3 s in the long form. If the worker is to be
	// marked down, the fault also lasts until it is.
	lasts time.Duration
	// hits returns whether the fault has hit a client's request. The fault lasts until it has hit each client
	// that it concerns, however slow the machine is.
	hits func(r *faultRun, v *visit) bool
	// concerns returns whether the fault can hit a client. Default: all.
	concerns func(client int) bool
	// strike begins the fault on one engine, and returns what ends it.
	strike func(r *faultRun, e *canned.Engine) (end func())
	// clients changes the manners of the clients.
	clients func(r *faultRun)
	// retried is the reason of the retries: there must be some. Further reasons
	// may be there, and no others. Empty: there must be none. "any": whatever.
	retried string
	marked  marked
	// long is for rows that are only in the long form.
	long bool
	// allowed are the fates beside served that requests may have.
	allowed []fate
	// few says that the struck worker gets few attempts: see fewAttempts. The fault also lasts until that shows.
	few bool
	// check looks at the rest.
	check func(t *testing.T, r *faultRun)
}

// marked says whether the struck worker is to be marked down.
type marked int

const (
	may marked = iota
	must
	mustNot
	notInFault // but perhaps when it ends
)

// faultRun is a run of a row.
type faultRun struct {
	row     *faultRow
	t       *testing.T
	s       *server
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
	early                     int                // those of requests that may have begun before the mark
	held                      float64            // tokens that the first one is thought to hold at its end
	moved                     time.Duration      // until the first mark; -1 without
	worst                     time.Duration      // wait of requests that were served
}

const faultClients = 32

// faultPace makes an answer last about 0.1 s.
var faultPace = canned.Pace{Words: 20, FirstToken: 20 * time.Millisecond, PerWord: 4 * time.Millisecond}

// TestFaultTable has 32 clients hold streamed conversations with four engines at default
// settings. Faults occur in the middle. The test logs the table of counts in
// tests/README.md.
func TestFaultTable(t *testing.T) {
	takesSeconds(t)
	lines := []string{
		"| fault | sent | served | retried | failed | broken | left | attempts there | marked down after | longest wait | back after |",
		"|---|---|---|---|---|---|---|---|---|---|---|",
	}
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
	t.Logf("the table:\n%s", strings.Join(lines, "\n"))
}

// line returns the row of the table.
func (r *faultRun) line() string {
	var retried []string
	for reason, n := range r.retries {
		retried = append(retried, fmt.Sprintf("%v %s", n, reason))
	}
	return fmt.Sprintf("| %s | %d | %d | %s | %d (%d strange) | %d | %d | %d | %v | %v | %v |", r.row.name, r.sent, r.n[served], strings.Join(retried, ", "),
		r.n[failed], r.n[strange], r.n[broken], r.n[left], r.attempts, r.moved, r.worst, r.backAt.Sub(r.endedAt))
}

// dial returns the address under which the ith engine is known.
func (r *faultRun) dial(i int) string {
	if r.dials != nil {
		return r.dials[i]
	}
	return r.engines[i].Addr()
}

// struck returns the engines that have the fault.
func (r *faultRun) struck() []*canned.Engine { return r.engines[:max(r.row.struck, 1)] }

// play runs the load, with the fault in its middle.
func (r *faultRun) play() {
	t, row := r.t, r.row
	var directive string
	if row.site != nil {
		directive = row.site(r)
	} else {
		r.engines = startEngines(t, 4, faultPace)
		directive = route(r.engines, row.block)
	}
	r.s = startCaddy(t, directive)
	eventually(t, "the metrics", func() bool { r.before = r.s.scrape(t); return r.before != nil })
	goroutines := runtime.NumGoroutine()

	r.load = &load{s: r.s}
	if row.clients != nil {
		row.clients(r)
	}
	r.load.start(t.Context(), faultClients)
	time.Sleep(span(400*time.Millisecond, time.Second))
	eventually(t, "the clients to be in their stride", func() bool { return len(r.load.all()) >= 2*faultClients })
	end := r.strike()
	eventually(t, "a retry", func() bool {
		met := r.isRetried()
		if !met { // a look at the worker was sooner than the requests, or none came
			r.endedAt = time.Now()
			end()
			r.awaitReturn()
			end = r.strike()
		}
		return met
	})
	r.endedAt = time.Now()
	r.attempts = r.tries() - r.was
	if m := r.s.scrape(t); m != nil {
		r.held = m.value("caddy_kv_router_worker_cached_tokens", fmt.Sprintf("worker=%q", r.dial(0)))
	}
	end()
	r.awaitReturn()
	time.Sleep(span(200*time.Millisecond, time.Second))
	if !r.load.stop() {
		t.Error("requests hang after the fault")
	}
	r.collect()
	r.s.client.CloseIdleConnections()
	for _, e := range r.engines {
		e.Kill()
	}
	eventually(t, "goroutines as before", func() bool { return runtime.NumGoroutine() <= goroutines+4 })
}

// strike begins the fault, and returns what ends it. It waits until the fault has lasted long enough.
func (r *faultRun) strike() (end func()) {
	t, row := r.t, r.row
	r.struckAt = time.Now()
	r.was = r.tries()
	var ends []func()
	for _, e := range r.struck() {
		ends = append(ends, row.strike(r, e))
	}
	r.struckBy = time.Now()
	lasts := row.lasts
	if lasts == 0 {
		lasts = span(800*time.Millisecond, 3*time.Second)
	}
	time.Sleep(time.Until(r.struckAt.Add(lasts)))
	if row.marked == must {
		eventually(t, "the mark", func() bool { return r.firstMark() >= 0 })
	}
	if row.few {
		r.awaitRound("the end of what began before the mark")
		r.early = r.tries() - r.was
		r.awaitRound("requests after the mark")
	}
	if row.hits != nil {
		eventually(t, "the fault to hit each client", r.hasHitAll)
	}
	return func() {
		for _, end := range ends {
			end()
		}
	}
}

// isRetried returns whether there was a retry for the reason of the row, if it wants one.
func (r *faultRun) isRetried() bool {
	reason, _, _ := strings.Cut(r.row.retried, " ")
	label := fmt.Sprintf("reason=%q", reason)
	return reason == "" || reason == "any" || r.s.scrape(r.t).value(retriesTotal, label) > r.before.value(retriesTotal, label)
}

// hasHitAll returns whether the fault has hit each client that it concerns.
func (r *faultRun) hasHitAll() bool {
	hit := make(map[int]bool)
	for _, v := range r.load.all() {
		hit[v.client] = hit[v.client] || v.begun.After(r.struckBy) && r.row.hits(r, &v)
	}
	for client := range faultClients {
		if !hit[client] && (r.row.concerns == nil || r.row.concerns(client)) {
			return false
		}
	}
	return true
}

// awaitRound waits until each client has ended a request that begins from now on.
func (r *faultRun) awaitRound(what string) {
	now := time.Now()
	eventually(r.t, what, func() bool {
		ended := make(map[int]bool)
		for _, v := range r.load.all() {
			if v.begun.After(now) {
				ended[v.client] = true
			}
		}
		return len(ended) == faultClients
	})
}

// tries returns how many requests the faulty engines have received or refused.
func (r *faultRun) tries() int {
	var m metrics
	eventually(r.t, "the metrics", func() bool { m = r.s.scrape(r.t); return m != nil })
	n := r.received()
	for i := range r.struck() {
		n += int(m.value(retriesTotal, fmt.Sprintf("worker=%q", r.dial(i)), `reason="refused"`))
	}
	return n
}

// received returns how many requests the faulty engines have received.
func (r *faultRun) received() int {
	n := 0
	for _, e := range r.struck() {
		n += e.Requests()
	}
	return n
}

// awaitReturn waits until each faulty engine serves again.
func (r *faultRun) awaitReturn() {
	for _, e := range r.struck() {
		eventually(r.t, "the engine serves again", func() bool {
			return slices.ContainsFunc(r.load.all(), func(v visit) bool {
				return v.engine == e.Name() && v.fate == served && v.begun.After(r.endedAt)
			})
		})
	}
	r.backAt = time.Now()
}

// count returns how many requests are of a kind.
func (r *faultRun) count(is func(v *visit) bool) (n int) {
	for i := range r.visits {
		if is(&r.visits[i]) {
			n++
		}
	}
	return n
}

// collect counts the requests by their fate.
func (r *faultRun) collect() {
	r.s.booksAtZero(r.t)
	r.after = r.s.scrape(r.t)
	r.visits = r.load.all()
	r.sent = len(r.visits)
	for _, v := range r.visits {
		r.n[v.fate]++
		if v.fate == served && v.ended.After(r.struckAt) && v.begun.Before(r.endedAt) {
			r.worst = max(r.worst, v.wait())
		}
	}
	r.retries = make(map[string]float64)
	for _, reason := range []string{"refused", "broken", "404", "429", "503", "529", "first_token", "hung"} {
		label := fmt.Sprintf("reason=%q", reason)
		if n := r.after.value(retriesTotal, label) - r.before.value(retriesTotal, label); n > 0 {
			r.retries[reason] = n
		}
	}
	r.moved = r.firstMark()
}

// firstMark returns how long it took until one of the faulty engines was marked down; -1 if none was.
func (r *faultRun) firstMark() time.Duration {
	first := time.Duration(-1)
	for i := range r.struck() {
		if at, ok := r.s.markedDownAt(r.t, r.dial(i), r.struckAt); ok && (first < 0 || at.Sub(r.struckAt) < first) {
			first = at.Sub(r.struckAt)
		}
	}
	return first
}

// markedDownAt returns the time of the first log line after a given time that says that a
// worker is marked down.
func (s *server) markedDownAt(t *testing.T, dial string, after time.Time) (time.Time, bool) {
	t.Helper()
	for _, e := range s.entries(t, markedDown) {
		if at := time.UnixMicro(int64(e.TS * 1e6)); e.Upstream == dial && at.After(after.Add(-time.Millisecond)) {
			return at, true
		}
	}
	return time.Time{}, false
}

// judge compares the run with the expected result of the row.
func (r *faultRun) judge() {
	t, row := r.t, r.row
	for f := failed; f < fates; f++ {
		if n := r.n[f]; n > 0 && !slices.Contains(row.allowed, f) && !r.machineWasLate(f) {
			t.Errorf("%d requests %v, the first: %s", n, f, r.firstOf(f))
		}
	}
	if reasons := strings.Fields(row.retried); row.retried != "any" {
		for reason, n := range r.retries {
			if !slices.Contains(reasons, reason) {
				t.Errorf("%v retries for the reason %s, want none", n, reason)
			}
		}
	}
	if inFault := r.moved >= 0 && r.moved < r.endedAt.Sub(r.struckAt); row.marked == must && r.moved < 0 ||
		row.marked == mustNot && r.moved >= 0 && (r.n[broken] == 0 || !r.machineWasLate(broken)) || row.marked == notInFault && inFault {
		t.Errorf("the worker was marked down after %v", r.moved)
	}
	r.judgeCounters()
	if row.few {
		r.fewAttempts()
	}
	if row.check != nil {
		row.check(t, r)
	}
}

// judgeCounters compares the router's counts with the clients'.
func (r *faultRun) judgeCounters() {
	counted := func(labels ...string) int {
		return int(r.after.value(requestsTotal, labels...) - r.before.value(requestsTotal, labels...))
	}
	all := counted()
	if all > r.sent || all < r.sent-r.n[left] { // who leaves at once may not have been heard
		r.t.Errorf("the router counted %d requests, the clients sent %d", all, r.sent)
	}
	if r.n[left] > 0 {
		return // one may leave when all of its answer is on its way
	}
	for outcome, want := range map[string]int{"ok": r.n[served], "broken": r.n[broken], "client_gone": 0} {
		if got := counted(fmt.Sprintf("outcome=%q", outcome)); got != want {
			r.t.Errorf("%s: the router counted %d, the clients %d", outcome, got, want)
		}
	}
	if got := counted(`outcome="engine_error"`) + counted(`outcome="unavailable"`); got != r.n[failed]+r.n[strange] {
		r.t.Errorf("the router counted %d failures, the clients %d", got, r.n[failed]+r.n[strange])
	}
}

// machineWasLate returns whether the row has deadlines, and only engines and clients without a fault have
// missed them.
func (r *faultRun) machineWasLate(f fate) bool {
	faulty := func(v visit) bool {
		if r.load.slow != nil {
			return r.load.slow(v.client)
		}
		return v.engine == r.engines[0].Name()
	}
	return strings.Contains(r.row.block, deadline.String()) && !slices.ContainsFunc(r.visits, func(v visit) bool {
		return v.fate == f && (faulty(v) || v.ended.Sub(v.begun) < deadline)
	})
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

// handle makes the engines answer with h until the fault ends, which closes over.
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
