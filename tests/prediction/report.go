package prediction

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
)

// Row is the figures of some turns.
type Row struct {
	Case string `json:"case"`
	API  string `json:"api"`
	// Turns is how many there are, Later those after the first of a conversation.
	Turns int `json:"turns"`
	Later int `json:"later"`
	// WithinBlock is the share of later turns with an error of one block at most.
	WithinBlock float64 `json:"within_block"`
	// WithinTenth is the share of all turns with an error of a tenth of the prompt
	// at most.
	WithinTenth float64 `json:"within_tenth"`
	// AsExpected is the share of later turns in which the engine found the turn
	// before and its answer, and no more.
	AsExpected float64 `json:"as_expected"`
	// Moved is the share of later turns that went to another worker.
	Moved float64 `json:"moved"`
	// The quantiles of predicted minus reported in later turns, in blocks.
	Q05 float64 `json:"q05"`
	Q50 float64 `json:"q50"`
	Q95 float64 `json:"q95"`
	// Worst is the error of most blocks.
	Worst float64 `json:"worst"`
}

// Summarize returns a row for each case and API, in the order of their first
// turns, and at the end one for all. Turns within so many tokens are within a
// block.
func Summarize(turns []Turn, block int) []Row {
	type key struct{ name, api string }
	groups := map[key][]Turn{}
	var names []string
	for _, t := range turns {
		k := key{t.Case, t.API}
		groups[k] = append(groups[k], t)
		if !slices.Contains(names, t.Case) {
			names = append(names, t.Case)
		}
	}
	var rows []Row
	for _, name := range names {
		for _, api := range APIs {
			if g := groups[key{name, api.String()}]; g != nil {
				rows = append(rows, figures(g, name, api.String(), block))
			}
		}
	}
	return append(rows, figures(turns, "all", "all", block))
}

func figures(turns []Turn, name, api string, block int) Row {
	r := Row{Case: name, API: api, Turns: len(turns)}
	var errs []float64
	for _, t := range turns {
		off := t.Predicted - t.Reported
		if 10*max(off, -off) <= t.Prompt {
			r.WithinTenth++
		}
		if t.Turn == 0 {
			continue
		}
		r.Later++
		errs = append(errs, float64(off)/float64(block))
		if max(off, -off) <= block {
			r.WithinBlock++
		}
		if t.Reported == t.Expected {
			r.AsExpected++
		}
		if t.Moved {
			r.Moved++
		}
	}
	r.WithinTenth /= float64(max(1, r.Turns))
	for _, share := range []*float64{&r.WithinBlock, &r.AsExpected, &r.Moved} {
		*share /= float64(max(1, r.Later))
	}
	slices.Sort(errs)
	if n := len(errs); n > 0 {
		at := func(q float64) float64 { return errs[int(q*float64(n-1)+0.5)] }
		r.Q05, r.Q50, r.Q95, r.Worst = at(0.05), at(0.5), at(0.95), errs[n-1]
		if math.Abs(errs[0]) > math.Abs(r.Worst) {
			r.Worst = errs[0]
		}
	}
	return r
}

// Print writes rows as a table.
func Print(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "case\tapi\tturns\t<=1 block\t<=10%\tengine found the last turn\tmoved\tq05\tq50\tq95\tworst\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%d\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%+.1f\t%+.1f\t%+.1f\t%+.1f\t\n",
			r.Case, r.API, r.Turns, 100*r.WithinBlock, 100*r.WithinTenth, 100*r.AsExpected, 100*r.Moved, r.Q05, r.Q50, r.Q95, r.Worst)
	}
	return t.Flush()
}
