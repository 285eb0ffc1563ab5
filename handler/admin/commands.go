package admin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "kv-router",
		Usage: "run|status|ready|explain|drain|undrain|sessions|page|check|call|record",
		Short: "Shows and steers kv_router",
		Long: `
Shows and steers a kv_router that runs, by Caddy's admin endpoint: that of
--address, or else of the configuration file, or else the default one.

Commands end with code 0. Code 1 means that the command failed. Code 2 means that
something needs a look: a worker of status, a refused request of explain, a
problem of check, or a drain that did not end in time.`,
		CobraFunc: func(cmd *cobra.Command) {
			cmd.AddCommand(statusCommand(), explainCommand(), drainCommand("drain"), drainCommand("undrain"),
				sessionsCommand(), pageCommand(), checkCommand(), recordCommand(), readyCommand(), runCommand(), callCommand())
			cmd.Args, cmd.RunE = cobra.NoArgs, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		},
	})
}

// The codes with which commands end. Caddy's own ones begin with these.
const (
	exitOK = iota
	exitFailed
	exitLook
)

func command(use, short string, args cobra.PositionalArgs, run func(*client, caddycmd.Flags) (int, error)) *cobra.Command {
	cmd := plainCommand(use, short, args, func(fl caddycmd.Flags) (int, error) {
		addr, err := caddycmd.DetermineAdminAPIAddress(fl.String("address"), nil, fl.String("config"), fl.String("adapter"))
		if err != nil {
			return exitFailed, err
		}
		return run(&client{addr: addr, pool: fl.String("pool")}, fl)
	})
	cmd.Flags().StringP("address", "", "", "Address of the admin endpoint")
	cmd.Flags().StringP("config", "c", "", "Configuration file that names the admin endpoint")
	cmd.Flags().StringP("adapter", "a", "", "Name of the config adapter of that file")
	cmd.Flags().StringP("pool", "p", pool.DefaultName, "Name of the pool, if there are several")
	return cmd
}

// plainCommand returns a command that needs no admin endpoint.
func plainCommand(use, short string, args cobra.PositionalArgs, run func(caddycmd.Flags) (int, error)) *cobra.Command {
	logged := caddycmd.WrapCommandFuncForCobra(run)
	return &cobra.Command{
		Use: use, Short: short, Args: args, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			cmd.SilenceErrors = true // they are logged, but those of args are not
			return logged(cmd, args)
		},
	}
}

type client struct {
	addr, pool string
	timeout    time.Duration // adminTimeout if 0
	once       bool          // what it asks for must not be done twice
}

const (
	// adminTimeout is how long the admin endpoint may take.
	adminTimeout = 20 * time.Second
	// adminTries and adminPause are for reloads, in which Caddy replaces its admin endpoint.
	adminTries, adminPause = 4, 300 * time.Millisecond
)

// do makes a request to the admin endpoint. What it asks for may be done twice, but for once.
func (c *client) do(method, uri string, headers http.Header, body []byte) (*http.Response, error) {
	type result struct {
		resp *http.Response
		err  error
	}
	if headers == nil {
		headers = make(http.Header)
	}
	timeout := cmp.Or(c.timeout, adminTimeout)
	headers.Set("Connection", "close") // each call has a client of its own
	for try := 1; ; try++ {
		got := make(chan result, 1)
		go func() {
			var r result
			r.resp, r.err = caddycmd.AdminAPIRequest(c.addr, method, uri, headers, bytes.NewReader(body)) //nolint:bodyclose // call does
			got <- r
		}()
		select {
		case r := <-got:
			text := fmt.Sprint(r.err)
			if try < adminTries && !c.once && (strings.HasSuffix(text, "EOF") || strings.HasSuffix(text, "reset by peer")) {
				time.Sleep(adminPause)
				continue
			}
			if _, answer, failed := strings.Cut(text, "caddy responded with error: "); failed {
				return nil, errors.New(readable(answer))
			}
			if r.err != nil {
				return nil, fmt.Errorf("asking the admin endpoint %s (--address or --config names another): %w", c.addr, r.err)
			}
			return r.resp, nil
		case <-time.After(timeout):
			return nil, fmt.Errorf("%s has not answered in %s", c.addr, timeout)
		}
	}
}

func readable(answer string) string {
	status, body, _ := strings.Cut(answer, ": ")
	var e struct {
		Error string `json:"error"`
	}
	if json.Unmarshal([]byte(body), &e) != nil || e.Error == "" {
		return answer
	}
	return e.Error + " (" + status + ")"
}

// call makes a request about the pool, and decodes the answer into v.
func (c *client) call(method, path string, headers http.Header, body []byte, v any) error {
	resp, err := c.do(method, "/kv_router/pools/"+url.PathEscape(c.pool)+path, headers, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(v)
}

// readInput returns what a file has, or standard input for -; nil without a name.
func readInput(file string) ([]byte, error) {
	switch file {
	case "":
		return nil, nil
	case "-":
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(file) //nolint:gosec // the operator's
}

func drainCommand(what string) *cobra.Command {
	short := map[string]string{"drain": "Stops new requests to a worker", "undrain": "Ends a drain"}[what]
	cmd := command(what+" <worker>", short, cobra.ExactArgs(1), func(c *client, fl caddycmd.Flags) (int, error) {
		path := "/workers/" + url.PathEscape(fl.Arg(0))
		var w workerView
		var wait time.Duration
		action := what
		if what == "drain" {
			if wait = fl.Duration("wait"); fl.Bool("move") {
				action += "?move"
			}
		}
		if err := c.call(http.MethodPost, path+"/"+action, nil, nil, &w); err != nil {
			return exitFailed, err
		}
		for end := time.Now().Add(wait); !w.Drained && time.Now().Before(end); {
			time.Sleep(time.Second)
			if err := c.call(http.MethodGet, path, nil, nil, &w); err != nil {
				return exitFailed, err
			}
		}
		switch {
		case what == "undrain":
			fmt.Printf("%s gets new requests\n", w.Dial)
		case w.Drained:
			fmt.Printf("%s is drained: nothing runs on it\n", w.Dial)
		default:
			fmt.Printf("%s drains: %d requests run on it\n", w.Dial, w.Load.Requests)
			if wait > 0 {
				return exitLook, nil
			}
		}
		return exitOK, nil
	})
	if what == "drain" {
		cmd.Flags().Duration("wait", 0, "Wait so long until nothing runs on it")
		cmd.Flags().Bool("move", false, "Its streams go on at other workers, as far as they can")
	}
	return cmd
}

func sessionsCommand() *cobra.Command {
	cmd := command("sessions [show|unbind <key>]", "Lists, shows and unbinds sessions", cobra.MaximumNArgs(2), runSessions)
	cmd.Long = `Lists the bound sessions by the hashes of their keys, or shows or unbinds one.`
	cmd.Flags().Bool("hashed", false, "The key is a hash of the list")
	cmd.Flags().String("model", "", "The session's model")
	cmd.Flags().String("tenant", "", "The session's tenant or cache salt")
	cmd.Flags().String("scope", "", "The session's scope")
	cmd.Flags().Int("limit", defaultPage, "Sessions to list")
	cmd.Flags().String("after", "", "List those after this hash")
	return cmd
}

func runSessions(c *client, fl caddycmd.Flags) (int, error) {
	var page sessionPage
	method, q := "", url.Values{}
	switch what := fl.Arg(0); {
	case what == "":
		q.Set("limit", fmt.Sprint(fl.Int("limit")))
		q.Set("after", fl.String("after"))
		if err := c.call(http.MethodGet, "/sessions?"+q.Encode(), nil, nil, &page); err != nil {
			return exitFailed, err
		}
	case fl.Arg(1) == "":
		return exitFailed, fmt.Errorf("sessions %s: the session's key is missing", what)
	case what == "show":
		method = http.MethodGet
	case what == "unbind":
		method = http.MethodDelete
	default:
		return exitFailed, fmt.Errorf("sessions: must be followed by show or unbind, got %q", what)
	}
	if method != "" {
		for _, name := range []string{"model", "tenant", "scope"} {
			q.Set(name, fl.String(name))
		}
		if fl.Bool("hashed") {
			q.Set("hashed", "")
		}
		var one sessionView
		if err := c.call(method, "/sessions/"+url.PathEscape(fl.Arg(1))+"?"+q.Encode(), nil, nil, &one); err != nil {
			return exitFailed, err
		}
		page.Sessions = []sessionView{one}
	}
	rows := [][]string{{"HASH OF THE KEY", "WORKER", "KIND", "EXPIRES"}}
	for _, s := range page.Sessions {
		rows = append(rows, []string{s.KeyHash, cmp.Or(s.Dial, fmt.Sprint(s.Worker)), s.Kind, age(s.Expires)})
	}
	writeTable(os.Stdout, rows)
	if page.Next != "" {
		fmt.Printf("%d in all; the next ones: --after %s\n", page.Total, page.Next)
	}
	return exitOK, nil
}

func recordCommand() *cobra.Command {
	var from, to string
	cmd := &cobra.Command{
		Use:   "record [--journal <file>] [--out <file>]",
		Short: "Writes the requests of a journal as a trace for tests/replay",
		Long: `Writes the requests of a journal as a trace: when they arrived, how long prompts
and answers were, and which prompts begin alike. It contains no text and no hash
of one. The router may be running.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if from == "" {
				from = pool.JournalFile(pool.DefaultName)
			}
			var out io.Writer = os.Stdout
			if to != "" {
				file, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600) //nolint:gosec // the operator's
				if err != nil {
					return err
				}
				defer func() { _ = file.Close() }()
				out = file
			}
			n, others, err := journal.Trace(from, out)
			if err != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "%d requests; %d others had no known prompt, or no answer\n", n, others)
			return nil
		},
	}
	cmd.Flags().StringVar(&from, "journal", "", "the journal's file; default: that of the pool default")
	cmd.Flags().StringVar(&to, "out", "", "the trace's file; default: standard output")
	return cmd
}
