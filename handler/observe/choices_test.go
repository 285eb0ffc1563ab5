package observe

import (
	"fmt"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

func candidatesOf(costs ...float64) (list []kvscore.Candidate) {
	for _, cost := range costs {
		list = append(list, kvscore.Candidate{Cost: cost})
	}
	return list
}

// TestBestCandidatesAreKept keeps the chosen candidate and the cheapest others.
func TestBestCandidatesAreKept(t *testing.T) {
	for _, c := range []struct {
		costs  []float64
		chosen int
		want   string
	}{
		{[]float64{3}, 0, "0"},
		{[]float64{3, 1, 2}, 2, "210"},
		{[]float64{9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, 0, "09876543"},
		{[]float64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 9, "90123456"},
	} {
		past := PastChoice{Unit: "ms"}
		past.Note(candidatesOf(c.costs...), func(i int) string { return fmt.Sprint(i) }, c.chosen)
		got := ""
		for i := range past.Kept {
			got += past.Candidates[i].Dial
		}
		if got != c.want || past.Among != len(c.costs) {
			t.Errorf("%v, %d chosen: kept %s of %d, want %s", c.costs, c.chosen, got, past.Among, c.want)
		}
	}
}

// TestLastChoicesAreRemembered makes more choices than the pool remembers.
func TestLastChoicesAreRemembered(t *testing.T) {
	p := new(Choices)
	for i := range keptChoices + 10 {
		p.Remember(&PastChoice{Request: fmt.Sprint(i)})
	}
	if got := p.Past(keptChoices*2, "", 0); len(got) != keptChoices || got[0].Request != fmt.Sprint(keptChoices+9) {
		t.Errorf("%d choices", len(got))
	}
	if got := p.Past(9, "9", 0); len(got) != 0 {
		t.Errorf("a choice is remembered for too long: %v", got[0].N)
	}
	if got := p.Past(9, "10", 11); len(got) != 1 || got[0].N != 11 {
		t.Errorf("the oldest choice: %d found", len(got))
	}
}

func TestRequestIDs(t *testing.T) {
	for id, want := range map[string]bool{"": false, "a-1": true, "a b": false, "é": false, "a\n": false, string(make([]byte, 200)): false} {
		if ValidRequestID(id) != want {
			t.Errorf("%q: want %v", id, want)
		}
	}
}
