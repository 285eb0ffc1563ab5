package trace

import (
	"testing"
	"time"
)

func TestHalvesOfAnOpenLoop(t *testing.T) {
	tr := &Trace{Name: "x", BlockTokens: 16}
	for i := range 11 {
		tr.Requests = append(tr.Requests, Request{At: time.Duration(i*i) * time.Second, In: i + 1, Out: 1})
	}
	first, second := tr.Half(false), tr.Half(true)
	if len(first.Requests) != 8 || len(second.Requests) != 3 { // 7² < 50 ≤ 8²
		t.Fatalf("halves of %d and %d requests", len(first.Requests), len(second.Requests))
	}
	if q := second.Requests[0]; q.At != 14*time.Second || q.In != 9 || tr.Requests[8].At != 64*time.Second {
		t.Errorf("the second half begins with %+v", q)
	}
	if first.Name == second.Name {
		t.Error("both have one name")
	}
}

func TestHalvesOfAClosedLoop(t *testing.T) {
	tr := &Trace{BlockTokens: 16, Closed: true}
	for session := range 5 {
		for turn := range session + 1 {
			tr.Requests = append(tr.Requests, Request{Session: 2 * session, Turn: turn, In: 1, Out: 1})
		}
	}
	first, second := tr.Half(false), tr.Half(true)
	if len(first.Requests) != 1+3+5 || len(second.Requests) != 2+4 {
		t.Fatalf("halves of %d and %d requests", len(first.Requests), len(second.Requests))
	}
	for _, q := range second.Requests {
		if q.Session != 2 && q.Session != 6 {
			t.Errorf("the second half has session %d", q.Session)
		}
	}
}

func TestDuration(t *testing.T) {
	tr := &Trace{Closed: true, Requests: []Request{
		{At: 5 * time.Second},
		{At: 90 * time.Second, Think: 2 * time.Second, Turn: 1},
		{At: 3 * time.Second, Session: 1},
		{Think: 10 * time.Second, Session: 1, Turn: 1},
	}}
	if d := tr.Duration(); d != 13*time.Second {
		t.Errorf("a closed loop of %v", d)
	}
	if tr.Closed = false; tr.Duration() != 90*time.Second {
		t.Errorf("an open loop of %v", tr.Duration())
	}
}
