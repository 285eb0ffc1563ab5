package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

// maxCall is the longest body of a call, in bytes.
const maxCall = 16 << 20

type called struct {
	ID     uint64          `json:"id"`
	Dial   string          `json:"dial"`
	Status int             `json:"status"` // 0 without an answer
	Answer json.RawMessage `json:"answer,omitempty"`
	Error  string          `json:"error,omitempty"`
}

func (c *called) failed() bool { return c.Status/100 != 2 }

// callWorkers posts the body to a path of all workers, or of that of ?worker=, at the same time. What
// is known of their models and caches follows.
func callWorkers(r *http.Request, p *pool.Pool) (any, error) {
	path := r.URL.Query().Get("path")
	if _, err := url.ParseRequestURI(path); err != nil || !strings.HasPrefix(path, "/") {
		return nil, apiError(http.StatusBadRequest, "path: must be a path of the engines, such as /v1/load_lora_adapter, got %q", path)
	}
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxCall))
	if err != nil {
		return nil, apiError(http.StatusBadRequest, "body: %w", err)
	}
	workers := slices.DeleteFunc(sortedWorkers(p), (*worker.Worker).IsBackup)
	if name := r.URL.Query().Get("worker"); name != "" {
		w, err := workerOf(p, name)
		if err != nil {
			return nil, err
		}
		workers = []*worker.Worker{w}
	}
	answers := make([]called, len(workers))
	var all sync.WaitGroup
	for i, w := range workers {
		all.Go(func() { answers[i] = callWorker(r, p, w, path, body) })
	}
	all.Wait()
	return answers, nil
}

func callWorker(r *http.Request, p *pool.Pool, w *worker.Worker, path string, body []byte) called {
	c := called{ID: w.ID, Dial: w.Dial}
	status, text, err := p.Members.Call(r.Context(), w, path, body)
	c.Status = status
	if err != nil && !errors.Is(err, upstream.ErrTooLong) {
		c.Error = err.Error()
	} else {
		c.Answer = rawjson.OrString(text)
	}
	if c.failed() {
		return c
	}
	if engine.DropsCache(path) {
		p.ClearCache(w, observe.ClearedReset)
	}
	if x := explainerOf(p); x != nil {
		x.Dispatcher.Prober.AskAgain(w) // it may serve other models now
	}
	return c
}

func callCommand() *cobra.Command {
	cmd := command("call <path>", "Posts to all engines, for instance to load an adapter", cobra.ExactArgs(1), runCall)
	cmd.Long = `Posts to a path of all engines at the same time, or of one, as a request of the
router's own, and prints each answer. The router then knows which models they
serve, and that caches are empty. It ends with code 2 if an engine has failed.`
	cmd.Example = "  caddy kv-router call /v1/load_lora_adapter --body adapter.json\n  caddy kv-router call /reset_prefix_cache --worker gpu-1:8000"
	cmd.Flags().String("body", "", "File with the body, - for standard input")
	cmd.Flags().String("worker", "", "Address or id of the only worker to call")
	cmd.Flags().Duration("timeout", 10*time.Minute, "How long the engines may take")
	return cmd
}

func runCall(c *client, fl caddycmd.Flags) (code int, err error) {
	body, err := readInput(fl.String("body"))
	if err != nil {
		return exitFailed, err
	}
	c.once, c.timeout = true, fl.Duration("timeout")
	q := url.Values{"path": {fl.Arg(0)}, "worker": {fl.String("worker")}}
	var answers []called
	if err = c.call(http.MethodPost, "/call?"+q.Encode(), http.Header{"Content-Type": {"application/json"}}, body, &answers); err != nil {
		return exitFailed, err
	}
	for i := range answers {
		a := &answers[i]
		said := string(a.Answer)
		if a.Error != "" {
			said = a.Error
		}
		fmt.Printf("%s: %d %s\n", a.Dial, a.Status, said)
		if a.failed() {
			code = exitLook
		}
	}
	return code, nil
}
