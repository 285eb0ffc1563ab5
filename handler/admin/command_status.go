package admin

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
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
			writeStatus(os.Stdout, &s)
		}
		if !fl.Bool("watch") {
			if len(s.Workers) == 0 || slices.ContainsFunc(s.Workers, workerView.needsLook) {
				return exitLook, nil
			}
			return exitOK, nil
		}
		time.Sleep(time.Second)
	}
}

// needsLook returns whether a worker is not as the operator wants it.
func (w workerView) needsLook() bool {
	switch w.State {
	case stateOK, stateFull, stateUntried, stateDraining, stateDrained:
		return len(w.Anomalies) > 0
	}
	return true
}

func writeStatus(to io.Writer, s *stateView) {
	r := &s.Recent
	fmt.Fprintf(to, "pool %s, policy %s: %d workers, %d sessions, %d in the queue\n",
		s.Pool, s.Policy, len(s.Workers), s.Sessions, s.Waiting)
	for _, parts := range [][]pool.Queued{s.Classes, s.Tenants} {
		for _, q := range parts {
			if q.Class != "" || q.Tenant != "" {
				fmt.Fprintf(to, "in the queue, class %q, tenant %q: %d requests, %d of them held, the oldest for %.1f s\n",
					q.Class, q.Tenant, q.Requests, q.Held, q.Oldest)
			}
		}
	}
	fmt.Fprintf(to, "last 5 minutes: %d requests, %d failed, TTFT p50 %s, p99 %s, hits %s (predicted %s)\n\n",
		r.Attempts, r.Failed, millis(r.P50), millis(r.P99), percent(r.Hits), percent(r.Foreseen))
	t := newTable(to, "WORKER", "STATE", "MODEL", "RUN", "WAIT", "KV", "HITS", "P50", "P99", "REQS", "FAIL", "EVENTS")
	for i := range s.Workers {
		w := &s.Workers[i]
		state := w.State
		if len(w.Anomalies) > 0 {
			state = strings.TrimPrefix(strings.Join(append([]string{state}, w.Anomalies...), " "), stateOK+" ")
		}
		if w.Role != engine.RoleBoth {
			state = string(w.Role) + " " + state
		}
		waiting := "-"
		if w.Load.Waiting != nil {
			waiting = fmt.Sprint(*w.Load.Waiting)
		}
		knowledge := ""
		if n := len(w.KVEvents); n > 0 {
			knowledge = strings.Replace(w.KVEvents[n-1].Knowledge.String(), "approximate", "approx", 1)
		}
		t.row(ending(w.Dial, 20), beginning(state, 19), ending(strings.Join(w.Models.names(), ","), 8), // in 100 columns
			fmt.Sprint(w.Load.Requests), waiting, percent(&w.Cache.Cached), percent(w.Recent.Hits),
			millis(w.Recent.P50), millis(w.Recent.P99), fmt.Sprint(w.Recent.Attempts), fmt.Sprint(w.Recent.Failed), knowledge)
	}
	_ = t.Flush()
	if l := s.Limits; l != nil {
		for i := range l.Top {
			fmt.Fprintf(to, "\n%s", l.Top[i].String())
		}
	}
	for _, in := range s.Open {
		fmt.Fprintf(to, "\ncondition, for %s: %s", age(in.Begun), in.What)
	}
	for _, o := range s.Routers {
		fmt.Fprintf(to, "\nother router %s: %s, seen %s ago", o.Name, o.State, age(o.Seen))
	}
	if len(s.Open)+len(s.Routers) > 0 || s.Limits != nil {
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

// table writes lines in columns.
type table struct{ *tabwriter.Writer }

// newTable returns a table with its first line. Flush writes it.
func newTable(to io.Writer, heads ...string) table {
	t := table{tabwriter.NewWriter(to, 0, 0, 1, ' ', 0)}
	t.row(heads...)
	return t
}

func (t table) row(cells ...string) { fmt.Fprintln(t, strings.Join(cells, "\t")) }

// beginning returns at most the first n characters of a text.
func beginning(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

// ending returns at most the last n characters of a text: ends tell addresses apart.
func ending(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return "…" + string(r[len(r)-n+1:])
	}
	return s
}
