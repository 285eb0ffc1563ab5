package tests

import (
	"io"
	"net/http"
	"slices"
	"testing"
	"time"
)

func init() { faultRows = slices.Concat(faultRows, silences, strangers) }

// silences are the rows of engines that send nothing, or nothing more, on connections that
// stay open. The fault's end closes these.
var silences = []faultRow{
	{
		name: "no header", strike: handle(hang), retried: "any", unmarkedInFault: true, check: hungToTheEnd,
	},
	{
		name: "no header, first_token 300ms", strike: handle(hang), block: []string{"timeouts {\nfirst_token 300ms\n}"},
		retried: "first_token broken", marked: true, check: movedBy(300 * time.Millisecond),
	},
	{
		name: "header, no first token", strike: handle(headerOnly), retried: "any", unmarkedInFault: true, check: hungToTheEnd,
	},
	{
		name: "header, no first token, first_token 300ms", strike: handle(headerOnly), block: []string{"timeouts {\nfirst_token 300ms\n}"},
		retried: "first_token broken", marked: true, check: movedBy(300 * time.Millisecond),
	},
	{
		name: "stream stalls", strike: handle(stalls), allowed: []fate{broken}, unmarkedInFault: true, check: brokenAsMet,
	},
	{
		name: "stream stalls, stream_idle 300ms", strike: handle(stalls), block: []string{"timeouts {\nstream_idle 300ms\n}"},
		allowed: []fate{broken}, marked: true,
		check: func(t *testing.T, r *faultRun) {
			// First tokens let it back each time that its mark is over.
			most := faultClients * (1 + int(r.endedAt.Sub(r.struckAt)/(800*time.Millisecond)))
			if met := int(r.met.Load()); r.n[broken] != met || met > most {
				t.Errorf("%d requests broke, %d met the fault; want as many, and not more than %d", r.n[broken], met, most)
			}
			if r.moved < 150*time.Millisecond {
				t.Errorf("marked down after %v, before its time was over", r.moved)
			}
		},
	},
	{
		name: "slow clients, stream_idle 300ms", strike: nothing, unmarked: true, clients: slowOnes,
		block: []string{"timeouts {\nstream_idle 300ms\n}"},
	},
	{
		name: "hung engine, no deadlines", strike: handle(hang), lasts: 22 * time.Second, long: true,
		retried: "any", marked: true,
	},
}

// strangers are the rows of answers that do not match their content type, all with status
// 200.
var strangers = []faultRow{
	stranger("HTML as text/event-stream", "text/event-stream", htmlPage, false),
	stranger("HTML as application/json", "application/json", htmlPage, true),
	stranger("empty stream", "text/event-stream", "", true),
}

func stranger(name, kind, body string, long bool) faultRow {
	return faultRow{
		name: name, long: long, allowed: []fate{strange}, marked: true, check: strangeAsMet,
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
// served. No client has more than one of them.
func hungToTheEnd(t *testing.T, r *faultRun) {
	met := int(r.met.Load())
	if met == 0 || met > faultClients {
		t.Errorf("%d requests met the fault, want some, and at most one of each client", met)
	}
	waited := 0
	for _, v := range r.visits {
		if v.begun.Before(r.endedAt) && v.first.After(r.endedAt) && v.wait() > time.Second/2 {
			waited++
		}
	}
	if waited > met {
		t.Errorf("%d requests waited for the end, %d met the fault", waited, met)
	}
}

// movedBy expects that the worker is marked down when its time is over, not before.
// Requests that meet the fault were sent a little before it.
func movedBy(d time.Duration) func(*testing.T, *faultRun) {
	return func(t *testing.T, r *faultRun) {
		if r.moved >= 0 && r.moved < d/2 {
			t.Errorf("marked down after %v, before its time was over", r.moved)
		}
		fewAttempts(t, r)
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
