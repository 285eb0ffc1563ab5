package exactness

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Figures are those of some requests.
type Figures struct {
	Requests int
	Exact    int // predicted to the token
	Within   int // predicted to one block
	Later    int // turns after the first of a conversation
	Moved    int // later turns that went to another target

	predicted, reported, prompt int
	worst                       int // tokens
}

// Add counts a request. block is the number of tokens in a block.
func (f *Figures) Add(s *Sample, block int) {
	f.Requests++
	off := s.Off()
	if off == 0 {
		f.Exact++
	}
	if max(off, -off) <= block {
		f.Within++
	}
	if max(off, -off) > max(f.worst, -f.worst) {
		f.worst = off
	}
	f.predicted, f.reported, f.prompt = f.predicted+s.Predicted, f.reported+s.Reported, f.prompt+s.Prompt
	if s.Before != (Target{}) {
		f.Later++
		if s.Before != s.At {
			f.Moved++
		}
	}
}

func percent(n, of int) string { return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(max(1, of))) }

// Print writes a table with a row for each phase and one for all.
func (l *Load) Print(w io.Writer, block int, phases ...string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "phase\trequests\texact\t<=1 block\tworst, tokens\tlater turns\tmoved\tcached, predicted\treported\tfailed\t")
	for _, phase := range append(phases, "all") {
		var f Figures
		for i := range l.Samples {
			if s := &l.Samples[i]; s.Phase == phase || phase == "all" {
				f.Add(s, block)
			}
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%+d\t%d\t%d\t%s\t%s\t%d\t\n", phase, f.Requests, percent(f.Exact, f.Requests), percent(f.Within, f.Requests),
			f.worst, f.Later, f.Moved, percent(f.predicted, f.prompt), percent(f.reported, f.prompt), l.failed[phase])
	}
	fmt.Fprintln(t)
	return t.Flush()
}

// Look is what the admin API says after a phase.
type Look struct {
	Phase   string
	Workers []Worker
}

// PrintStreams writes a table of the streams of KV events.
func PrintStreams(w io.Writer, looks []Look) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "after\tengine\trank\tstate\tknowledge\tsequence\tlag ms\tgaps\treplays\treconnects\trestarts\tstored\tremoved\tcleared\theld\t")
	for _, l := range looks {
		for i := range l.Workers {
			for rank, e := range l.Workers[i].Events {
				fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t\n", l.Phase, i, rank, e.State, e.Knowledge, number(e.Sequence), millis(e.Lag),
					e.Gaps, e.Replays, e.Reconnects, e.Restarts, e.Stored, e.Removed, e.Cleared, e.Held["device"])
			}
		}
	}
	fmt.Fprintln(t)
	return t.Flush()
}

// Checks prints what was checked, and keeps whether all is well.
type Checks struct {
	W      io.Writer
	Failed bool
}

// Check prints a result.
func (c *Checks) Check(ok bool, format string, args ...any) {
	verdict := "ok    "
	if !ok {
		verdict, c.Failed = "FAILED", true
	}
	fmt.Fprintf(c.W, "%s  %s\n", verdict, fmt.Sprintf(format, args...))
}

func number(n *uint64) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprint(*n)
}

func millis(seconds *float64) string {
	if seconds == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f", 1000**seconds)
}
