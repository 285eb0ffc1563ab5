package admin

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

func statusCommand() *cobra.Command {
	cmd := command("status", "Shows the workers of a pool", cobra.NoArgs, runStatus)
	cmd.Long = `Shows the workers of a pool and their last five minutes. It ends with code 2 if a
worker needs a look, or there is none.`
	cmd.Flags().BoolP("watch", "w", false, "Show it anew each second")
	cmd.Flags().Bool("json", false, "Print the answer of the admin endpoint")
	return cmd
}

func runStatus(c *client, fl caddycmd.Flags) (int, error) {
	for {
		var raw json.RawMessage
		if err := c.call(http.MethodGet, fmt.Sprintf("/state?since=%d", time.Now().UnixNano()/1e10-2), nil, nil, &raw); err != nil {
			return exitFailed, err
		}
		var s stateView
		if err := json.Unmarshal(raw, &s); err != nil {
			return exitFailed, err
		}
		if fl.Bool("watch") {
			fmt.Print("\x1b[H\x1b[2J")
		}
		if fl.Bool("json") {
			_, _ = os.Stdout.Write(raw)
		} else {
			writeStatus(os.Stdout, &s)
		}
		if !fl.Bool("watch") {
			if len(s.Workers) == 0 || slices.ContainsFunc(s.Workers, workerState.needsLook) {
				return exitLook, nil
			}
			return exitOK, nil
		}
		time.Sleep(time.Second)
	}
}

// needsLook returns whether a worker is not as the operator wants it.
func (w workerState) needsLook() bool {
	switch w.State {
	case stateOK, stateFull, stateUntried, stateDraining, stateDrained:
		return len(w.Signs) > 0
	}
	return true
}

func writeStatus(to io.Writer, s *stateView) {
	r := &s.Recent
	fmt.Fprintf(to, "pool %s, policy %s: %d workers, %d sessions, %d in the queue\n",
		s.Pool, s.Policy, len(s.Workers), s.Sessions, s.Waiting)
	fmt.Fprintf(to, "last 5 minutes: %d requests, %d failed, TTFT p50 %s, p99 %s, hits %s (predicted %s)\n\n",
		r.Attempts, r.Failed, millis(r.P50), millis(r.P99), percent(r.Hits), percent(r.Foreseen))
	t := newTable("WORKER", "STATE", "MODEL", ">RUN", ">WAIT", ">KV", ">HITS", ">P50", ">P99", ">REQS", ">FAIL", "EVENTS")
	t.most = []int{20, 19, 8, 4, 4, 4, 4, 5, 5, 5, 4, 7} // 100 columns with the spaces
	for i := range s.Workers {
		w := &s.Workers[i]
		state := w.State
		if len(w.Signs) > 0 {
			state = strings.TrimPrefix(strings.Join(append([]string{state}, w.Signs...), " "), stateOK+" ")
		}
		if w.Role != "" {
			state = string(w.Role) + " " + state
		}
		waiting := "-"
		if w.Waiting != nil {
			waiting = fmt.Sprint(*w.Waiting)
		}
		_, knowledge, _ := strings.Cut(strings.Replace(w.Events, "approximate", "approx", 1), " ")
		t.row(w.Dial, state, strings.Join(w.Models, ","), fmt.Sprint(w.Running), waiting, percent(&w.Held), percent(w.Recent.Hits),
			millis(w.Recent.P50), millis(w.Recent.P99), fmt.Sprint(w.Recent.Attempts), fmt.Sprint(w.Recent.Failed), knowledge)
	}
	t.write(to)
	for _, in := range s.Open {
		fmt.Fprintf(to, "\ncondition, for %s: %s", age(in.Begun), in.What)
	}
	for _, o := range s.Routers {
		fmt.Fprintf(to, "\nother router %s: %s, seen %s ago", o.Name, o.State, age(o.Seen))
	}
	if len(s.Open)+len(s.Routers) > 0 {
		fmt.Fprintln(to)
	}
}

func percent(f *float64) string {
	if f == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100**f)
}

func millis(ms float64) string {
	switch {
	case ms == 0:
		return "-"
	case ms < 1000:
		return fmt.Sprintf("%.0fms", ms)
	}
	return fmt.Sprintf("%.1fs", ms/1e3)
}

func age(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
}

// table is text in columns. Those whose heading begins with > are aligned to the right.
type table struct {
	rows [][]string
	most []int // the widths at which cells are cut; nil cuts none
}

func newTable(heads ...string) *table { return &table{rows: [][]string{heads}} }

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

// write writes the table. A cell that is too wide loses its beginning: ends tell addresses apart.
func (t *table) write(to io.Writer) {
	heads := slices.Clone(t.rows[0])
	widths := make([]int, len(heads))
	for n, row := range t.rows {
		for i, cell := range row {
			if n == 0 {
				cell = strings.TrimPrefix(cell, ">")
			}
			if size := utf8.RuneCountInString(cell); t.most != nil && size > t.most[i] {
				cell = "…" + string([]rune(cell)[size-t.most[i]+1:])
			}
			row[i] = cell
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range t.rows {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if heads[i][0] == '>' {
				line.WriteString(pad + cell + " ")
			} else {
				line.WriteString(cell + pad + " ")
			}
		}
		fmt.Fprintln(to, strings.TrimRight(line.String(), " "))
	}
}
