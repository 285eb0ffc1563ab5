package admin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

func statusCommand() *cobra.Command {
	cmd := command("status", "Shows the workers of a pool", cobra.NoArgs, runStatus)
	cmd.Long = `Shows the workers of a pool and their last five minutes. It ends with code 2 if a
worker needs a look, if more than a tenth of all attempts fail, or if there is no
worker. Names are cut in the middle if the terminal is too narrow.`
	cmd.Flags().Bool("wide", false, "Cut no names")
	cmd.Flags().BoolP("watch", "w", false, "Show it anew each second")
	cmd.Flags().Bool("json", false, "Print the answer of the admin endpoint")
	return cmd
}

func runStatus(c *client, fl caddycmd.Flags) (int, error) {
	for {
		var raw json.RawMessage
		if err := c.call(http.MethodGet, fmt.Sprintf("/state?since=%d", time.Now().Unix()-20), nil, nil, &raw); err != nil {
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
			width, _, err := term.GetSize(int(os.Stdout.Fd()))
			if err != nil || fl.Bool("wide") {
				width = math.MaxInt
			}
			writeStatus(os.Stdout, &s, width)
		}
		if !fl.Bool("watch") {
			if len(s.Workers) == 0 || s.Recent.fails() || slices.ContainsFunc(s.Workers, workerView.needsLook) {
				return exitLook, nil
			}
			return exitOK, nil
		}
		time.Sleep(time.Second)
	}
}

func (w workerView) needsLook() bool {
	switch w.State {
	case stateOK, stateUntried, stateDraining, stateDrained:
		return len(w.Anomalies) > 0
	}
	return true
}

func (r *recentView) fails() bool { return r.Failed >= fewFails && 10*r.Failed > r.Attempts }

func writeStatus(to io.Writer, s *stateView, width int) {
	fmt.Fprintf(to, "kv_router %s, pool %s, policy %s: %d workers, %d sessions, %d in the queue\n",
		s.Version, s.Pool, s.Policy, len(s.Workers), s.Sessions, s.Waiting)
	var refused int64
	for i := range s.ByClass {
		refused += s.ByClass[i].Refused
	}
	s.Recent.write(to, refused)
	writeClasses(to, s)
	writeWorkers(to, s.Workers, width)
	for i := range s.Workers {
		for _, note := range s.Workers[i].Look {
			fmt.Fprintf(to, "\n%s %s: %s\n  %s", s.Workers[i].Dial, note.What, note.Effect, note.Advice)
		}
	}
	if l := s.Limits; l != nil {
		for i := range l.Top {
			fmt.Fprintf(to, "\n%s", l.Top[i].String())
		}
	}
	for _, in := range s.Open {
		fmt.Fprintf(to, "\ncondition, for %s, last met %s ago: %s\n  %s", age(in.Begun), age(in.Last), in.What, cmp.Or(in.Advice, "The manual has no advice."))
		if in.Error != "" {
			fmt.Fprintf(to, "\n  Last: %s", in.Error)
		}
	}
	for _, o := range s.Routers {
		fmt.Fprintf(to, "\nother router %s: %s, seen %s ago", o.Name, o.State, age(o.Seen))
	}
	fmt.Fprintln(to)
}

// writeClasses says what waits of each class, and what became of its requests in the last five minutes.
func writeClasses(to io.Writer, s *stateView) {
	if len(s.ByClass) == 0 {
		return
	}
	rows := [][]string{{"CLASS", "WAITING", "HELD", "OLDEST", "IN TIME", "LATE", "DEMOTED", "REFUSED", "TENANTS THAT WAIT"}}
	for i := range s.ByClass {
		c, tenants := &s.ByClass[i], ""
		for _, q := range s.Tenants {
			if q.Class == c.Class {
				tenants += fmt.Sprintf(" %s: %d", q.Tenant, q.Requests)
			}
		}
		row := []string{cmp.Or(c.Class, "-"), fmt.Sprint(c.Requests), fmt.Sprint(c.Held), millis(1e3 * c.Oldest)}
		for _, n := range []int64{c.Outcomes["kept"], c.Outcomes["late"], c.Outcomes["demoted"], c.Refused} {
			row = append(row, fmt.Sprint(n))
		}
		rows = append(rows, append(row, cmp.Or(strings.TrimSpace(tenants), "-")))
	}
	dropEmpty(rows)
	writeTable(to, rows)
	fmt.Fprintln(to)
}

func (r *recentView) write(to io.Writer, refused int64) {
	fmt.Fprintf(to, "last 5 minutes: %d requests, %d attempts, %d of them failed", r.Requests, r.Attempts, r.Failed)
	if refused > 0 {
		fmt.Fprintf(to, "; %d requests refused", refused)
	}
	if r.P50 > 0 {
		fmt.Fprintf(to, "\nstreams: first token p50 %s, p99 %s, then %s between tokens", millis(r.P50), millis(r.P99), millis(r.Pace))
	}
	if r.PlainP50 > 0 {
		fmt.Fprintf(to, "\nplain answers: p50 %s, p99 %s, %s per token", millis(r.PlainP50), millis(r.PlainP99), millis(r.PlainPace))
	}
	switch {
	case r.Hits != nil:
		fmt.Fprintf(to, "\nhits: %s of the prompt tokens were cached, %s as predicted", percent(r.Hits), percent(r.Foreseen))
		if 2*r.Reports < r.Requests {
			fmt.Fprintf(to, "\n  Only %d answers report it: for streams, set inject_usage.", r.Reports)
		}
	case r.Requests > 0:
		fmt.Fprint(to, "\nhits: unknown, because no answer reports cached tokens\n  For streams, set inject_usage. Start vLLM with --enable-prompt-tokens-details.")
	}
	fmt.Fprint(to, "\n\n")
}

func writeWorkers(to io.Writer, list []workerView, width int) {
	rows := append(make([][]string, 0, 1+len(list)), []string{
		"WORKER", "STATE", "MODEL", "RUN", "WAIT", "KV", "HITS", "TTFT P50", "TTFT P99", "PLAIN P50", "ATTEMPTS", "FAILED", "EVENTS",
	})
	for i := range list {
		w := &list[i]
		state, waiting, run, knowledge := strings.Join(append([]string{w.State}, w.Anomalies...), " "), "-", fmt.Sprint(w.Load.Requests), "-"
		if len(w.Anomalies) > 0 {
			state = strings.TrimPrefix(state, stateOK+" ")
		}
		if w.Role != engine.RoleBoth {
			state = string(w.Role) + " " + state
		}
		if w.Load.MaxRunning > 0 {
			run += fmt.Sprintf("/%d", w.Load.MaxRunning)
		}
		if w.Load.Waiting != nil {
			waiting = fmt.Sprint(*w.Load.Waiting)
		}
		if n := len(w.KVEvents); n > 0 {
			knowledge = w.KVEvents[n-1].Knowledge.String()
		}
		r := &w.Recent
		rows = append(rows, []string{
			w.Dial, state, cmp.Or(strings.Join(w.Models.names(), ","), "-"), run, waiting, percent(&w.Cache.Cached), percent(r.Hits),
			millis(r.P50), millis(r.P99), millis(r.PlainP50), fmt.Sprint(r.Attempts), fmt.Sprint(r.Failed), knowledge,
		})
	}
	fit(rows, width)
	writeTable(to, rows)
}

// dropEmpty leaves out columns that have only a dash.
func dropEmpty(rows [][]string) {
	for c := range slices.Backward(rows[0]) {
		if !slices.ContainsFunc(rows[1:], func(row []string) bool { return row[c] != "-" }) {
			for i := range rows {
				rows[i] = slices.Delete(rows[i], c, c+1)
			}
		}
	}
}

// fit cuts the names of workers and models so that the rows have a width.
func fit(rows [][]string, width int) {
	dropEmpty(rows)
	const workers, models = 0, 2
	for _, c := range []int{models, workers} {
		most, needed := 0, 0
		for i := range rows[0] {
			longest := 0
			for _, row := range rows {
				longest = max(longest, len([]rune(row[i])))
			}
			if needed += longest + 1; i == c {
				most = longest
			}
		}
		most = max(most-max(needed-width, 0), 14)
		for i := range rows {
			if name := rows[i][c]; c == workers {
				rows[i][c] = middle(name, most)
			} else if r := []rune(name); len(r) > most { // of one vendor, and with like endings
				r = []rune(name[strings.LastIndexByte(name, '/')+1:])
				rows[i][c] = string(r[:min(len(r), most)])
			}
		}
	}
}

// middle returns at most n characters of a text. Both ends tell names apart.
func middle(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-n/2-1]) + "…" + string(r[len(r)-n/2:])
	}
	return s
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

// writeTable writes lines in columns.
func writeTable(to io.Writer, rows [][]string) {
	t := tabwriter.NewWriter(to, 0, 0, 1, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(t, strings.Join(row, "\t"))
	}
	_ = t.Flush()
}
