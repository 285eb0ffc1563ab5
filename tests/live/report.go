package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/stats"
)

// row is the figures of some turns. Errors are predicted minus reported tokens.
type row struct {
	Case string
	API  string
	// Turns is how many there are, Later those after the first of a conversation.
	Turns int
	Later int
	// Exact and WithinBlock are the shares of turns without an error, and with one of a
	// block at most. WithinTenth is that with an error of a tenth of the prompt at most.
	Exact       float64
	WithinBlock float64
	WithinTenth float64
	// AsExpected is the share of later turns in which the engine found the turn before
	// and its answer, and no more. Moved is that of those that another target answered.
	AsExpected float64
	Moved      float64
	// Quantiles are those of 0.05, 0.5 and 0.95 of the errors, Worst is the largest, in blocks.
	Quantiles [3]float64
	Worst     float64
	// Hits is the share of prompt tokens that the engines had cached.
	Hits   float64
	Failed int
}

// summarize returns a row for each case and API, in the order of their first turns, and at
// the end one for all.
func (c *client) summarize() (rows []row) {
	var names [][2]string
	groups := make(map[[2]string][]turn)
	for _, t := range c.turns {
		k := [2]string{t.Case, t.API}
		if groups[k] == nil {
			names = append(names, k)
		}
		groups[k] = append(groups[k], t)
	}
	for _, k := range names {
		r := figures(groups[k], c.block)
		r.Case, r.API, r.Failed = k[0], k[1], c.failed[k[0]]
		rows = append(rows, r)
	}
	all := figures(c.turns, c.block)
	all.Case, all.API = "all", "all"
	for _, n := range c.failed {
		all.Failed += n
	}
	return append(rows, all)
}

func figures(turns []turn, block int) (r row) {
	var errs []float64
	prompt, cached := 0, 0
	for i := range turns {
		t := &turns[i]
		r.Turns++
		prompt, cached = prompt+t.Prompt, cached+t.Reported
		errs = append(errs, float64(t.off())/float64(block))
		count(&r.Exact, t.off() == 0)
		count(&r.WithinBlock, !t.wrong(block))
		count(&r.WithinTenth, !t.wrong(t.Prompt/10))
		if t.Turn == 0 {
			continue
		}
		r.Later++
		count(&r.AsExpected, t.Reported == t.Expected)
		count(&r.Moved, t.At != t.Before)
	}
	for _, share := range []*float64{&r.Exact, &r.WithinBlock, &r.WithinTenth} {
		*share /= float64(max(1, r.Turns))
	}
	for _, share := range []*float64{&r.AsExpected, &r.Moved} {
		*share /= float64(max(1, r.Later))
	}
	r.Hits = float64(cached) / float64(max(1, prompt))
	slices.Sort(errs)
	if n := len(errs); n > 0 {
		for i, q := range []float64{0.05, 0.5, 0.95} {
			r.Quantiles[i] = stats.Percentile(errs, q)
		}
		if r.Worst = errs[n-1]; math.Abs(errs[0]) > math.Abs(r.Worst) {
			r.Worst = errs[0]
		}
	}
	return r
}

func count(share *float64, is bool) {
	if is {
		*share++
	}
}

// printRows writes rows as a table.
func printRows(w io.Writer, rows []row) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "case\tapi\tturns\texact\t<=1 block\t<=10%\tengine found the last turn\tmoved\tq05\tq50\tq95\tworst\thits\tfailed\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%d\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%.1f %%\t%+.1f\t%+.1f\t%+.1f\t%+.1f\t%.1f %%\t%d\t\n",
			r.Case, r.API, r.Turns, 100*r.Exact, 100*r.WithinBlock, 100*r.WithinTenth, 100*r.AsExpected, 100*r.Moved,
			r.Quantiles[0], r.Quantiles[1], r.Quantiles[2], r.Worst, 100*r.Hits, r.Failed)
	}
	fmt.Fprintln(t)
	t.Flush()
}

// look is what the admin API shows after a phase.
type look struct {
	phase   string
	workers []worker
}

// printStreams writes a table of the streams of KV events.
func printStreams(w io.Writer, looks []look) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "after\tengine\trank\tstate\tknowledge\tsequence\tgaps\treplays\treconnects\trestarts\tstored\tremoved\tcleared\theld\t")
	for _, l := range looks {
		for i := range l.workers {
			for rank, s := range l.workers[i].Streams {
				number := "-"
				if s.Sequence != nil {
					number = fmt.Sprint(*s.Sequence)
				}
				fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t\n", l.phase, i, rank, s.State, s.Knowledge, number,
					s.Gaps, s.Replays, s.Reconnects, s.Restarts, s.Stored, s.Removed, s.Cleared, s.Held["device"])
			}
		}
	}
	fmt.Fprintln(t)
	t.Flush()
}

// checks are what must hold, with what was found.
type checks struct {
	w      io.Writer
	failed bool
}

func (c *checks) check(ok bool, format string, args ...any) {
	verdict := "ok    "
	if !ok {
		verdict, c.failed = "FAILED", true
	}
	fmt.Fprintf(c.w, "%s  %s\n", verdict, fmt.Sprintf(format, args...))
}

func (c *checks) err() error {
	if c.failed {
		return errors.New("a check failed")
	}
	return nil
}

// racy are the cases with requests at the same moment that share a prefix, with the least share of
// right predictions. Which of them comes first is not known.
var racy = map[string]float64{"shared": 0.97, "parallel": 0.9, "all": 0.9}

// checkTexts checks the predictions of conversations by text. All APIs count together: by each one
// there are few turns.
func (c *client) checkTexts(w io.Writer, rows []row) error {
	k := checks{w: w}
	right, turns := make(map[string]float64), make(map[string]float64)
	for _, r := range rows {
		right[r.Case] += r.WithinTenth * float64(r.Turns)
		turns[r.Case] += float64(r.Turns)
		if r.Case == "own" {
			k.check(r.WithinBlock >= 0.95, "%s: %.1f %% of predictions are right to one block", r.API, 100*r.WithinBlock)
		}
	}
	for name, n := range turns {
		k.check(right[name] >= cmp.Or(racy[name], 0.99)*n, "%s: %.0f of %.0f are right to a tenth of the prompt", name, right[name], n)
	}
	return k.err()
}

// checkEvents checks what the router knew from KV events. It has a second to learn of a
// reset, and one after a restart.
func (r *events) checkEvents(w io.Writer) error {
	k := checks{w: w}
	moved, later := 0, 0
	for i := range r.turns {
		if t := &r.turns[i]; t.Case == phaseFresh && t.Turn > 0 {
			later++
			if t.At != t.Before {
				moved++
			}
		}
	}
	may := 0.05 // leave an engine because it is busy
	if r.clients == 1 {
		may = 0
	}
	k.check(float64(moved) <= may*float64(later), "%d of %d later turns left the engine that holds the conversation", moved, later)
	early := 0
	for _, at := range []moment{r.reset, r.back} {
		if at.from.IsZero() {
			continue
		}
		soon, late := r.wrongAfter(at)
		k.check(late == 0, "after the %s: %d wrong predictions for that engine in the first second, %d later", at.name, soon, late)
		early += soon
	}
	right, n := 0, -early
	for i := range r.turns {
		if r.turns[i].Case == phaseDown { // until the router notices, it predicts from the old cache
			continue
		}
		n++
		if !r.turns[i].wrong(r.block) {
			right++
		}
	}
	k.check(100*right >= 99*n, "%d of %d predictions are right to one block, besides these %d", right, n, early)
	if !r.o.kind.exact {
		return k.err()
	}
	k.check(r.restart == nil, "the streams are exact %v after the restart", r.exactAfter.Round(time.Millisecond))
	var gaps, skipped uint64
	for _, wk := range r.looks[len(r.looks)-1].workers {
		for _, s := range wk.Streams {
			gaps += s.Gaps
			for _, n := range s.Skipped {
				skipped += n
			}
		}
	}
	k.check(gaps == 0 && skipped == 0, "%d gaps in the streams, %d events not used", gaps, skipped)
	if r.o.blocks > 0 {
		var most int64
		for _, l := range r.looks {
			for i := range l.workers {
				for _, s := range l.workers[i].Streams {
					most = max(most, s.Held["device"])
				}
			}
		}
		k.check(most > 0 && most <= int64(r.o.blocks), "the router has seen up to %d blocks in a cache of %d", most, r.o.blocks)
	}
	return k.err()
}

// wrongAfter counts the wrong predictions for a worker since a moment: those of the first
// second, and the later ones.
func (r *events) wrongAfter(at moment) (soon, late int) {
	for i := range r.turns {
		t := &r.turns[i]
		switch {
		case t.At.Worker != at.worker || t.Begun.Before(at.from) || t.Begun.After(at.to) || !t.wrong(r.block):
		case t.Begun.Sub(at.from) <= settle:
			soon++
		default:
			late++
		}
	}
	return soon, late
}
