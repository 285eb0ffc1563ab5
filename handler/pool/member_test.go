package pool

import (
	"context"
	"testing"
	"time"
)

// configuration has one worker.
type configuration struct {
	dial string
	name int // its answers have this status
}

func (c *configuration) Reaches(w *Worker) bool { return w.Dial == c.dial }

func (c *configuration) Call(context.Context, *Worker, string, []byte) (int, []byte, error) {
	return c.name, nil, nil
}

// TestCallsGoByTheNewestConfiguration has configurations come and go. The last one that has a
// worker is its way until the pool forgets workers, too.
func TestCallsGoByTheNewestConfiguration(t *testing.T) {
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1"}, WorkerSettings{Dial: "b:1"}))
	want := func(what, dial string, name, kept int) {
		t.Helper()
		got, _, err := p.Call(t.Context(), p.Worker(dial), "/", nil)
		if got != name || (err == nil) != (name > 0) || len(p.joined.list) != kept {
			t.Errorf("%s: %s is called by %d (%v), want %d; %d are known, want %d", what, dial, got, err, name, len(p.joined.list), kept)
		}
	}
	want("at first", "a:1", 0, 0)
	leaveFirst := p.Join(&configuration{"a:1", 1})
	want("joined", "a:1", 1, 1)
	want("joined", "b:1", 0, 1)
	leaveSecond := p.Join(&configuration{"a:1", 2})
	want("reloaded", "a:1", 2, 2)
	leaveFirst()
	want("the old one has left", "a:1", 2, 1)
	leaveThird := p.Join(&configuration{"b:1", 3})
	leaveSecond()
	want("only the ended one had it", "a:1", 2, 2)
	leaveThird()
	p.Join(&configuration{"a:1", 4})
	want("it is back", "a:1", 4, 2)
	want("another is gone", "b:1", 3, 2)
	p.pruneMembers(time.Now().Add(2 * WorkerGrace))
	want("for long", "b:1", 0, 1)
}
