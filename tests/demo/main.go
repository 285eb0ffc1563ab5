// Command demo shows what kv_router is for, in a few minutes and with Go alone:
//
//	go run ./tests/demo
//
// It starts four simulated engines (package engine) and a Caddy before them, all
// in this process, and holds the same conversations three times, with OpenAI's
// own client: through reverse_proxy with round_robin, through kv_router, and
// through kv_router while one engine dies and comes back. Then it prints how they
// compare, and draws the time to first token as an SVG.
//
// The engines run faster than real ones would; all times that the demo shows are
// the engines' own, that is, real time multiplied by the speed. What this machine,
// the proxy and the client take is multiplied with them.
//
// With -also there are runs with other policies of reverse_proxy, too: sticky,
// whose client names the conversation in a header, and least_conn.
//
// With -serve it starts engines and kv_router, and leaves the requests to you.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// options is the command line.
type options struct {
	svg      string // empty: a new file in the directory for temporary ones
	also     []contender
	serve    bool
	duration time.Duration // engines' time
	scale    float64
	seed     uint64
	speed    float64
}

// Speeds at which the engines run unless the command line says. Who tries them by
// hand wants them as they are.
const (
	defaultSpeed = 10
	serveSpeed   = 1
)

func parse(args []string) (*options, error) {
	o := new(options)
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	fs.StringVar(&o.svg, "svg", "", "`file` to draw the picture into (default a new one in the directory for temporary files)")
	fs.Func("also", "more runs, `names` with commas between them: sticky (reverse_proxy, by a header with the conversation), least_conn", o.addOthers)
	fs.BoolVar(&o.serve, "serve", false, "start engines and kv_router, and stay up until interrupted")
	fs.DurationVar(&o.duration, "duration", chats.window, "how long conversations begin, in the engines' time")
	fs.Float64Var(&o.scale, "scale", 1, "how many conversations there are, in terms of the default")
	fs.Uint64Var(&o.seed, "seed", 1, "decides on the conversations")
	fs.Float64Var(&o.speed, "speed", 0, "how many times faster than real the engines run, up to 100 (default 10, with -serve 1)")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	switch {
	case o.speed == 0 && o.serve:
		o.speed = serveSpeed
	case o.speed == 0:
		o.speed = defaultSpeed
	}
	if fs.NArg() > 0 || o.duration <= 0 || o.scale <= 0 || o.speed < 0 || o.speed > 100 {
		return nil, errors.New("flags must be positive, the speed at most 100, and nothing may follow them")
	}
	return o, nil
}

// addOthers takes names of contenders.
func (o *options) addOthers(names string) error {
	for name := range strings.SplitSeq(names, ",") {
		named := func(c contender) bool { return c.name == strings.TrimSpace(name) }
		i := slices.IndexFunc(others, named)
		switch {
		case i < 0:
			return fmt.Errorf("no contender is named %q", name)
		case !slices.ContainsFunc(o.also, named):
			o.also = append(o.also, others[i])
		}
	}
	return nil
}

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	switch {
	case err != nil:
	case o.serve:
		err = serve(ctx, os.Stdout, o.speed)
	default:
		err = compare(ctx, os.Stdout, os.Stderr, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1) //nolint:gocritic // nothing is left to cancel
	}
}

// compare makes the runs and reports on them.
func compare(ctx context.Context, out, progress io.Writer, o *options) error {
	s := chats
	s.window = o.duration
	s.rate *= o.scale
	w := newWorkload(s, o.seed)
	fmt.Fprintf(out, "%d conversations, %d requests, with %d engines that run %g times faster than real.\n"+
		"All times are the client's wall clock, multiplied by %g.\n\n", len(w.conversations), w.turns(), engineCount, o.speed, o.speed)
	// Who is to wait for minutes learns at once that there will be no picture.
	file, pictureErr := o.picture()
	if pictureErr != nil {
		fmt.Fprintf(progress, "There will be no picture: %v\n", pictureErr)
	}
	began := time.Now()
	results, err := playAll(ctx, slices.Concat(contenders, o.also), w, o.speed, progress)
	if err != nil {
		if file != nil && o.svg == "" {
			file.Close()
			os.Remove(file.Name()) //nolint:errcheck,gosec // ours, and empty
		}
		return err
	}
	report(out, results)
	fmt.Fprintf(out, "\nThe runs took %v.\n", time.Since(began).Round(time.Second))
	if pictureErr == nil {
		pictureErr = errors.Join(draw(file, results), file.Close())
	}
	if pictureErr != nil {
		return fmt.Errorf("drawing the picture: %w", pictureErr)
	}
	fmt.Fprintf(out, "Picture: %s\n", file.Name())
	return nil
}

// picture creates the file for the picture.
func (o *options) picture() (*os.File, error) {
	if o.svg == "" {
		return os.CreateTemp("", "kvrouter-demo-*.svg")
	}
	return os.Create(o.svg) //nolint:gosec // where the user wants it
}

// playAll makes the runs, one after the other.
func playAll(ctx context.Context, list []contender, w *workload, speed float64, progress io.Writer) ([]*result, error) {
	results := make([]*result, 0, len(list))
	for _, c := range list {
		r, err := play(ctx, c, w, speed, newTicker(progress, c.name, w.turns()))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		results = append(results, r)
	}
	return results, nil
}
