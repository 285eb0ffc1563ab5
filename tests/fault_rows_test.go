package tests

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// A row may close idle connections while a request is on its way on one. The
// request is sent again. If that meets another closed connection, it counts as
// broken.

// deadline is that of the rows which have one. Others keep it on a busy machine, too.
var deadline = span(time.Second, 300*time.Millisecond)

func deadlineOf(what string) string { return fmt.Sprintf("timeouts {\n%s %v\n}", what, deadline) }

// faultRows is the table. By default a row has a pool of four with default settings, and
// one faulty engine. The fault's end closes connections that hang.
var faultRows = []faultRow{
	{name: "connection refused", strike: refuses, retried: "refused broken", marked: must, few: true},
	{name: "connection hangs", strike: blocks, lasts: 4 * time.Second, retried: "refused broken", marked: must},
	{name: "closed without an answer", strike: handle(hangsUp), retried: "broken", marked: must, few: true},
	{
		name: "stream breaks", strike: handle(breaks), allowed: []fate{broken}, marked: must,
		few: true, check: brokenAsMet,
	},
	{name: "429", strike: status(429, ""), retried: "429", marked: must, few: true},
	{name: "429 with Retry-After", long: true, strike: status(429, "2"), retried: "429", marked: must, few: true},
	{name: "503", long: true, strike: status(503, ""), retried: "503", marked: must, few: true},
	{name: "503 with Retry-After", strike: status(503, "2"), retried: "503", marked: must, few: true},
	{name: "502", long: true, strike: status(502, ""), retried: "502", marked: must, few: true},
	{name: "500", strike: status(500, ""), allowed: []fate{failed}, marked: must, check: failedAsMet(24)},
	{
		name: "error of the request in a stream", strike: handle(says(tooLong)), allowed: []fate{failed}, marked: mustNot,
		check: oneTryEach,
	},
	{name: "error of the engine in a stream", long: true, strike: handle(says(dead)), marked: must},
	{
		name: "engine aborts streams", long: true, allowed: []fate{failed}, marked: mustNot, check: oneTryEach,
		strike: handle(says(`data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}` + "\n\n" + chatDone)),
	},
	{name: "400", long: true, strike: status(400, ""), allowed: []fate{failed}, marked: mustNot, check: itsShare},
	{
		name: "404", long: true, strike: status(404, ""), allowed: []fate{failed}, retried: "any", marked: must,
		check: func(t *testing.T, r *faultRun) {
			failedAsMet(r.usual()+faultClients)(t, r) // until most of its answers are errors
		},
	},
	{name: "404 for the model", strike: lacksModel, retried: "404", marked: mustNot},
	{name: "engine restarts", strike: killed, allowed: []fate{broken}, retried: "any", marked: must, check: cutOnly},
	{
		// if the retry meets the engine that dies next, there is no third attempt
		name: "half of the pool down", long: true, struck: 2, strike: killed, allowed: []fate{broken, failed}, retried: "any", marked: must, check: cutOnly,
	},
	{
		name: "all of the pool down", struck: 4, strike: killed, allowed: []fate{broken, failed}, retried: "any", marked: must,
		hits: isRefused, check: unavailable,
	},
	{
		name: "name of an engine not resolved", site: byName, retried: "refused broken", marked: must,
		strike: func(r *faultRun, e *canned.Engine) func() {
			r.dns.setIll(func(name string) bool { return strings.HasPrefix(name, "e1.") })
			e.SetKeepAlive(false) // connections that are there need no name
			return func() {
				r.dns.setIll(nil)
				e.SetKeepAlive(true)
			}
		},
		few: true,
		check: func(t *testing.T, r *faultRun) {
			if n := r.held; n == 0 {
				t.Error("the cache model was cleared, though the engine is where it was")
			}
		},
	},
	{
		name: "names of a dynamic source not resolved", site: dynamicA, marked: mustNot,
		strike: func(r *faultRun, e *canned.Engine) func() {
			r.dns.setIll(func(string) bool { return true })
			return func() { r.dns.setIll(nil) }
		},
	},
	{name: "slow clients", long: true, strike: nothing, marked: mustNot, clients: slowOnes},
	{name: "slow clients, stream_idle", strike: nothing, marked: mustNot, clients: slowOnes, block: deadlineOf("stream_idle")},
	{
		name: "clients leave", strike: nothing, marked: mustNot, allowed: []fate{left},
		clients: func(r *faultRun) {
			r.load.patience = func(client, n int) time.Duration {
				if client%2 == 0 {
					return 0
				}
				return time.Duration(1+(client*31+n*17)%120) * time.Millisecond
			}
		},
		concerns: func(client int) bool { return client%2 != 0 },
		hits:     func(_ *faultRun, v *visit) bool { return v.fate == left },
		check: func(t *testing.T, r *faultRun) {
			for _, e := range r.engines {
				if n := e.Active(); n > 0 {
					t.Errorf("%s still answers %d requests", e.Name(), n)
				}
			}
		},
	},
	{name: "no header", strike: handle(hang), retried: "any", marked: notInFault, check: hungToTheEnd},
	{
		name: "no header, first_token", strike: handle(hangOn), block: deadlineOf("first_token"),
		retried: "first_token", marked: must, few: true,
	},
	{name: "header, no first token", long: true, strike: handle(headerOnly), retried: "any", marked: notInFault, check: hungToTheEnd},
	{
		name: "header, no first token, first_token", long: true, strike: handle(headerOnly), block: deadlineOf("first_token"),
		retried: "any", marked: must, few: true,
	},
	{name: "stream stalls", long: true, strike: handle(stalls), allowed: []fate{broken}, marked: notInFault, check: brokenAsMet},
	{
		name: "stream stalls, stream_idle", strike: handle(stalls), block: deadlineOf("stream_idle"),
		allowed: []fate{broken}, marked: must,
		check: func(t *testing.T, r *faultRun) {
			// First tokens let it back each time that its mark is over. On a busy machine, streams of others stall, too.
			most := faultClients * (1 + int(r.endedAt.Sub(r.struckAt)/(800*time.Millisecond)))
			n := r.count(func(v *visit) bool { return v.fate == broken && v.engine == r.engines[0].Name() })
			if met := int(r.met.Load()); n != met || met > most {
				t.Errorf("%d requests broke, %d met the fault; want as many, and not more than %d", n, met, most)
			}
			if n := r.s.logged(t, "stream broke: the stream stalled"); n == 0 || n > len(r.engines)*most/faultClients { // one a mark
				t.Errorf("%d log lines say that a stream stalled, want 1 to %d", n, len(r.engines)*most/faultClients)
			}
		},
	},
	{name: "hung engine, no deadlines", strike: handle(hang), lasts: 22 * time.Second, long: true, retried: "any", marked: must},
	stranger("HTML as text/event-stream", "text/event-stream", htmlPage, false),
	stranger("HTML as application/json", "application/json", htmlPage, true),
	stranger("empty stream", "text/event-stream", "", true),
}

// hangsUp closes the connection without an answer.
func hangsUp(w http.ResponseWriter, _ *http.Request, _ <-chan struct{}) { canned.CloseConn(w, false) }

// breaks closes the connection in the middle of a stream.
func breaks(w http.ResponseWriter, _ *http.Request, _ <-chan struct{}) {
	words(w, 4, "word ")
	canned.CloseConn(w, false)
}

// says sends a word and the end of a stream; an error comes before any word.
func says(end string) func(http.ResponseWriter, *http.Request, <-chan struct{}) {
	return func(w http.ResponseWriter, _ *http.Request, _ <-chan struct{}) {
		if strings.Contains(end, "finish_reason") {
			words(w, 1, "word ")
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, end)
		_ = http.NewResponseController(w).Flush()
	}
}

// oneTryEach expects that each request that met the fault fails, and that no stream was to go on elsewhere.
func oneTryEach(t *testing.T, r *faultRun) {
	if met := int(r.met.Load()); r.n[failed] != met || met == 0 {
		t.Errorf("%d requests failed, %d met the fault; want as many", r.n[failed], met)
	}
	for _, name := range []string{resumedTotal, stayedTotal} {
		if n := r.after.value(name) - r.before.value(name); n > 0 {
			t.Errorf("%s: %v", name, n)
		}
	}
}

func nothing(*faultRun, *canned.Engine) func() { return func() {} }

func refuses(r *faultRun, e *canned.Engine) func() {
	e.Refuse()
	return accepts(r, e)
}

func blocks(r *faultRun, e *canned.Engine) func() {
	if err := e.Block(); err != nil {
		r.t.Skip(err)
	}
	r.struckAt, r.was = time.Now(), r.tries() // it took a moment
	return accepts(r, e)
}

func accepts(r *faultRun, e *canned.Engine) func() {
	return func() {
		if err := e.Accept(); err != nil {
			r.t.Error(err)
		}
	}
}

func killed(r *faultRun, e *canned.Engine) func() {
	e.Kill()
	return func() {
		if err := e.Restart(); err != nil {
			r.t.Error(err)
		}
	}
}

// byName addresses the engines by names, which a name server resolves.
func byName(r *faultRun) string {
	r.engines, r.dns = startEngines(r.t, 4, faultPace), startDNS(r.t)
	for i, e := range r.engines {
		name := fmt.Sprintf("e%d.engines.test", i+1)
		r.dns.setA(name, loopback(0))
		_, port, _ := net.SplitHostPort(e.Addr())
		r.dials = append(r.dials, net.JoinHostPort(name, port))
	}
	return fmt.Sprintf("kv_router {\nreverse_proxy %s {\ntransport http {\nresolvers %s\n}\n}\n}", strings.Join(r.dials, " "), r.dns.addr)
}

// dynamicA addresses the engines as addresses of one name.
func dynamicA(r *faultRun) string {
	engines, port := startEnginesOnAddresses(r.t, 4, faultPace)
	r.engines, r.dns = engines, startDNS(r.t)
	name := fmt.Sprintf("table%d.engines.test", port) // Caddy's cache is the process's
	r.dns.setA(name, loopbacks(4)...)
	return "kv_router {\nreverse_proxy {\n" + dynamicSource(r.dns, name, port) + "\n}\n}"
}

// slowOnes has four of the clients read slowly an answer that exceeds the buffers before
// them.
func slowOnes(r *faultRun) {
	r.load.turns, r.load.slow = 1, func(i int) bool { return i < 4 }
	smallReadBuffers(r.s.client)
	padding := ": " + strings.Repeat("slow ", 12<<10) + "\n\n" // a comment
	for _, e := range r.engines {
		e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get(slowHeader) != "" {
				for range 100 {
					words(w, 1, "word ")
					io.WriteString(w, padding)
				}
			} else {
				for range 20 {
					words(w, 1, "word ")
					pausing(r.Context(), faultPace.PerWord)
				}
			}
			io.WriteString(w, "data: [DONE]\n\n")
		})
	}
}

// smallReadBuffers shrinks the buffers before a client.
func smallReadBuffers(c *http.Client) {
	c.Transport.(*http.Transport).DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err == nil {
			err = conn.(*net.TCPConn).SetReadBuffer(256 << 10)
		}
		return conn, err
	}
}

// status answers with an error.
func status(code int, retryAfter string) func(*faultRun, *canned.Engine) func() {
	return handle(func(w http.ResponseWriter, _ *http.Request, _ <-chan struct{}) {
		w.Header().Set("Content-Type", "application/json")
		if retryAfter != "" {
			w.Header().Set("Retry-After", retryAfter)
		}
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"error":{"message":"no","type":"error","param":null,"code":%d}}`, code)
	})
}

// lacksModel makes an engine answer that it does not serve the model.
func lacksModel(r *faultRun, e *canned.Engine) func() {
	return handle(func(w http.ResponseWriter, _ *http.Request, _ <-chan struct{}) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, `{"error":{"message":"The model does not exist.","type":"NotFoundError","param":"model","code":404}}`)
	})(r, e)
}

// words sends n events of a stream with a text, and first the header if it was not sent.
func words(w http.ResponseWriter, n int, text string) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	http.NewResponseController(w).Flush()
	for range n {
		fmt.Fprintf(w, `data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"canned","choices":[{"index":0,"delta":{"content":%q},"finish_reason":null}]}`+"\n\n", text)
		http.NewResponseController(w).Flush()
	}
}

// hang pauses until the fault is over or the client has left, and then closes the
// connection.
func hang(w http.ResponseWriter, r *http.Request, over <-chan struct{}) {
	io.Copy(io.Discard, r.Body)
	select {
	case <-over:
		canned.CloseConn(w, false)
	case <-r.Context().Done():
	}
}

// hangOn pauses until the client has left, as it does with a deadline. If the fault's end closed its connection, the
// engine would get the request again, with what is left of the deadline.
func hangOn(_ http.ResponseWriter, r *http.Request, _ <-chan struct{}) {
	io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
}

// usual is how many requests the first engine got before the fault.
func (r *faultRun) usual() int {
	return r.count(func(v *visit) bool { return v.begun.Before(r.struckAt) && v.engine == r.engines[0].Name() })
}

// fewAttempts expects at most one request of each client before the mark. Then it expects at most one each time
// that a first phase of the mark is over. That takes 0.5 s or more. A first token opens the worker for more, until its
// stream breaks. The router sends a request again if its connection is closed without an answer.
func (r *faultRun) fewAttempts() {
	early, late := faultClients, int(r.endedAt.Sub(r.struckAt)/(500*time.Millisecond))
	switch reasons := strings.Fields(r.row.retried); {
	case slices.Contains(r.row.allowed, broken):
		late *= faultClients
	case slices.Contains(reasons, "broken"):
		early, late = 2*early, 2*late
	}
	if n := r.attempts - r.early; r.attempts > early+late || n > late {
		r.t.Errorf("%d attempts at the engine, %d of them after all requests that began before the mark; want at most %d and %d", r.attempts, n, early+late, late)
	}
}

// failedAsMet expects an error for each request that met the fault, and few of them.
func failedAsMet(most int) func(*testing.T, *faultRun) {
	return func(t *testing.T, r *faultRun) {
		if met := int(r.met.Load()); r.n[failed] != met || met < 5 || met > most {
			t.Errorf("%d requests failed, the engine gave %d errors; want as many, and 5 to %d", r.n[failed], met, most)
		}
	}
}

// itsShare expects that the engine gets about a quarter of the requests during the fault, though it
// answers them at once.
func itsShare(t *testing.T, r *faultRun) {
	all := r.count(func(v *visit) bool { return v.begun.After(r.struckAt) && v.begun.Before(r.endedAt) })
	if n := r.n[failed]; n < 5 || float64(n) > 0.45*float64(all) {
		t.Errorf("the engine got %d of %d requests during the fault", n, all)
	}
}

// brokenAsMet expects that exactly the requests that met the fault are broken.
func brokenAsMet(t *testing.T, r *faultRun) {
	if met := int(r.met.Load()); r.n[broken] != met {
		t.Errorf("%d requests broke, %d met the fault", r.n[broken], met)
	}
}

// cutOnly expects that only requests which ran when the fault began are broken, and that
// at most two fail.
func cutOnly(t *testing.T, r *faultRun) {
	later := r.count(func(v *visit) bool {
		return (v.fate == broken || v.fate == failed) && (v.begun.After(r.struckBy) || v.ended.Before(r.struckAt))
	})
	if later > 0 || r.n[failed] > 2 {
		t.Errorf("%d requests broke and %d failed, %d of all these did not run when the fault struck", r.n[broken], r.n[failed], later)
	}
}

// isRefused returns whether a request was refused during the fault.
func isRefused(_ *faultRun, v *visit) bool { return v.fate == failed }

// unavailable expects that all requests during the fault are refused at once, with a Retry-After. Each tries an engine
// once at most, and none waits in the queue.
func unavailable(t *testing.T, r *faultRun) {
	for _, v := range r.visits {
		if v.status == http.StatusBadGateway && v.begun.Before(r.struckBy) {
			continue // it broke on two engines, and may have crashed them
		}
		if v.fate == failed && (v.status != http.StatusServiceUnavailable || v.header.Get("Retry-After") == "") {
			t.Errorf("status %d, Retry-After %q, error %v, want 503 and some seconds", v.status, v.header.Get("Retry-After"), v.err)
			break
		}
	}
	if n := r.after.value(queueWaits) - r.before.value(queueWaits); n != 0 || r.attempts > len(r.engines)*(r.n[failed]+r.n[broken]) {
		t.Errorf("%d requests were refused after %d attempts, and %v waited in the queue", r.n[failed], r.attempts, n)
	}
}

// stranger is a row of answers with status 200 that do not match their content type.
func stranger(name, kind, body string, long bool) faultRow {
	return faultRow{
		name: name, long: long, allowed: []fate{strange}, marked: must, check: strangeAsMet,
		strike: handle(func(w http.ResponseWriter, _ *http.Request, _ <-chan struct{}) {
			w.Header().Set("Content-Type", kind)
			io.WriteString(w, body)
		}),
	}
}

// headerOnly begins a stream and hangs before its first token.
func headerOnly(w http.ResponseWriter, r *http.Request, over <-chan struct{}) {
	words(w, 0, "")
	hang(w, r, over)
}

// stalls hangs in the middle of a stream.
func stalls(w http.ResponseWriter, r *http.Request, over <-chan struct{}) {
	words(w, 4, "word ")
	hang(w, r, over)
}

// hungToTheEnd expects that the requests which met the fault wait for its end and are then
// served. No client has more than one of them. Others do not wait: a request waits if its end comes after the fault's,
// and many that began later were served before.
func hungToTheEnd(t *testing.T, r *faultRun) {
	met := int(r.met.Load())
	if met == 0 || met > faultClients {
		t.Errorf("%d requests met the fault, want some, and at most one of each client", met)
	}
	waited := r.count(func(v *visit) bool {
		return v.first.After(r.endedAt) && 2*faultClients <= r.count(func(other *visit) bool {
			return other.begun.After(v.begun) && other.ended.Before(r.endedAt)
		})
	})
	if waited > met {
		t.Errorf("%d requests waited for the end, %d met the fault", waited, met)
	}
}

// strangeAsMet expects such an answer for each request that met the fault, and few others.
func strangeAsMet(t *testing.T, r *faultRun) {
	met := int(r.met.Load())
	if r.n[strange] != met || met < 5 || met > 24 {
		t.Errorf("%d requests had such an answer, the engine gave %d; want as many, and 5 to 24", r.n[strange], met)
	}
	if n := int(r.after.value(fallbacksTotal, `reason="answer_unreadable"`) - r.before.value(fallbacksTotal, `reason="answer_unreadable"`)); n != met {
		t.Errorf("%d counted as unreadable, want %d", n, met)
	}
}
