package pool

import (
	"fmt"
	"testing"
	"time"
)

func TestAborts(t *testing.T) {
	var a Aborts
	begun := time.Now()
	at := begun.Add(time.Second)
	a.Note(at, "request-1")
	for _, v := range []struct {
		after time.Duration
		begun time.Time
		id    string
		want  bool
	}{
		{time.Second, begun, "request-1", true},
		{time.Second, begun, "request-12", true}, // as SGLang reads it
		{time.Second, begun, "request-2", false},
		{time.Second, begun, "", false},
		{time.Second, at.Add(1), "request-1", false}, // a later one of that name
		{2 * abortLasts, begun, "request-1", false},
	} {
		if got := a.Has(at.Add(v.after), v.begun, v.id); got != v.want {
			t.Errorf("%+v: %v", v, got)
		}
	}
	for i := range 3 * maxAborts {
		a.Note(at, fmt.Sprint(i))
	}
	if len(a.ids) > maxAborts {
		t.Errorf("%d ids are kept", len(a.ids))
	}
	a.Note(at, "")
	if !a.Has(at, begun, "any") || a.Has(at, at, "any") {
		t.Error("all that had begun are aborted")
	}
}
