package discovery

import (
	"testing"
	"time"
)

// report is one comparison: of which prompt, predicted and reported tokens.
type report struct {
	prompt              uint64
	predicted, reported int64
}

// times returns n reports of different prompts.
func times(n int, predicted, reported int64) []report {
	list := make([]report, n)
	for i := range list {
		list[i] = report{uint64(1000*reported) + uint64(i), predicted, reported}
	}
	return list
}

func same(n int, predicted, reported int64) []report {
	list := times(n, predicted, reported)
	for i := range list {
		list[i].prompt = 7
	}
	return list
}

func TestDoubts(t *testing.T) {
	for _, c := range []struct {
		name    string
		reports [][]report
		cleared int
	}{
		{"as predicted", [][]report{times(100, 5000, 4900)}, 0},
		{"never as predicted", [][]report{times(1000, 5000, 0)}, 0},
		{"confirmed, then not", [][]report{times(3, 5000, 4900), times(5, 5000, 0)}, 1},
		{"confirmed, then half", [][]report{times(3, 5000, 4900), times(100, 5000, 2600)}, 0},
		{"confirmed too seldom", [][]report{times(2, 5000, 4900), times(100, 5000, 0)}, 0},
		{"not in a row", [][]report{times(3, 5000, 4900), times(4, 5000, 0), times(1, 5000, 5000), times(4, 5000, 0)}, 0},
		{"one prompt that does not fit", [][]report{times(3, 5000, 4900), same(100, 5000, 0)}, 0},
		{"small ones", [][]report{times(3, 5000, 4900), times(100, 500, 0)}, 0},
		{"small differences", [][]report{times(3, 5000, 4900), times(100, 900, 400)}, 0},
		{"once and not again", [][]report{times(3, 5000, 4900), times(1000, 5000, 0)}, 1},
		{"again, and later", [][]report{
			times(3, 5000, 4900), times(5, 5000, 0), times(3, 5000, 4900), times(590, 5000, 0), times(3, 5000, 4900), times(5, 5000, 0),
		}, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			var d cacheCheck
			at, cleared := time.Unix(1e9, 0), 0
			for _, list := range c.reports {
				for _, r := range list {
					at = at.Add(time.Second)
					if d.compare(at, at.Add(-time.Millisecond), r.prompt, r.predicted, r.reported) {
						cleared++
						d.reset(at)
					}
				}
			}
			if cleared != c.cleared {
				t.Errorf("cleared %d times, want %d", cleared, c.cleared)
			}
		})
	}
}

// TestDoubtsOfBefore has answers come in whose predictions are older than the
// last clearing.
func TestDoubtsOfBefore(t *testing.T) {
	var d cacheCheck
	at := time.Unix(1e9, 0)
	for _, r := range times(3, 5000, 5000) {
		d.compare(at, at, r.prompt, r.predicted, r.reported)
	}
	d.reset(at)
	for _, r := range append(times(10, 5000, 5000), times(100, 5000, 0)...) {
		if d.compare(at.Add(time.Second), at.Add(-time.Second), r.prompt, r.predicted, r.reported) {
			t.Fatal("what was predicted before counts")
		}
	}
	if d.confirmed > 0 {
		t.Error("what was confirmed of before counts")
	}
}

// TestDoubtsAfterARestart has only wrong predictions with a cache model of an earlier run.
func TestDoubtsAfterARestart(t *testing.T) {
	var d cacheCheck
	d.restored()
	at, wrong := time.Unix(1e9, 0), false
	for _, r := range times(fewMisses, 5000, 0) {
		wrong = d.compare(at, at, r.prompt, r.predicted, r.reported)
	}
	if !wrong {
		t.Error("the model is not wrong")
	}
}

// TestReportsAreOfTheirKind has one kind of answer report what was cached.
func TestReportsAreOfTheirKind(t *testing.T) {
	var d cacheCheck
	plain, stream := ReportKind{"chat", false}, ReportKind{"chat", true}
	if d.reported(plain, false) {
		t.Error("something is said to be reported before it was")
	}
	if !d.reported(plain, true) || !d.reported(plain, false) || d.reported(stream, false) || d.reported(ReportKind{"messages", false}, false) {
		t.Error("what one kind reports is said of others, or not of itself")
	}
	if d.reset(time.Unix(1e9, 0)); d.reported(plain, false) {
		t.Error("what another life reported counts")
	}
}
