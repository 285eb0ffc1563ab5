package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"
)

// The phases of a run with -events.
const (
	phaseFresh = "fresh"       // the caches have room for all
	phaseEvict = "more"        // conversations until they may have none
	phaseReset = "reset"       // one engine has forgotten its cache
	phaseDown  = "engine down" // one engine ends and starts again
	phaseBack  = "engine back" // it serves again
)

const (
	longest   = 4000 // tokens of a conversation that goes on
	settle    = time.Second
	perPhase  = 20               // conversations that a phase begins
	toBeExact = 10 * time.Second // for the streams, after a start or the end of a phase
	batch     = 1500 * time.Millisecond
)

// events are conversations of token ids before engines that publish KV events.
type events struct {
	*client
	o       *options
	router  *router
	opened  []*talk
	reset   moment
	back    moment
	looks   []look
	restart error // why the streams were not exact again after the restart

	exactAfter time.Duration
}

// moment is when something happened to a worker, and until when the check looks.
type moment struct {
	name     string
	worker   uint64
	from, to time.Time
}

// open begins conversations. Each four begin with the same tokens. One of them may have a
// salt, one an adapter.
func (r *events) open(n int) []*talk {
	list := make([]*talk, 0, n)
	var head []uint32
	for i := range n {
		number := len(r.opened)
		rng := rand.New(rand.NewPCG(r.o.seed, uint64(number))) //nolint:gosec // not a secret
		if i%4 == 0 {
			head = newTokens(rng, 200+rng.IntN(200))
		}
		t := &talk{number: number, api: tokenIDs, model: r.o.model, stream: number%2 == 1, head: head, answer: 10 + rng.IntN(70), rng: rng}
		switch {
		case i%4 == 1 && r.o.kind.salts:
			t.salt = fmt.Sprintf("tenant-%d", i)
		case i%4 == 2 && r.o.adapter != "":
			t.model = r.o.adapter
		}
		r.opened, list = append(r.opened, t), append(list, t)
	}
	return list
}

// rounds lets each of the conversations take turns, one after the other.
func (r *events) rounds(ctx context.Context, phase string, talks []*talk, turns int) error {
	for range turns {
		if err := r.hold(ctx, phase, talks, 1); err != nil {
			return err
		}
	}
	return nil
}

// run holds conversations through all phases that the flags allow.
func (r *events) run(ctx context.Context, w io.Writer) error {
	phases := []func(context.Context) error{r.fresh, r.more}
	if r.o.kind.reset != "" {
		phases = append(phases, r.forget)
	}
	if r.o.restarts != nil {
		phases = append(phases, r.endAndStart)
	}
	var err error
	for _, phase := range phases {
		if err = phase(ctx); err != nil {
			break
		}
	}
	printRows(w, r.summarize())
	printStreams(w, r.looks)
	if err == nil {
		err = r.checkEvents(w)
	}
	return err
}

func (r *events) fresh(ctx context.Context) error {
	if err := r.look(ctx, "start"); err != nil {
		return err
	}
	if err := r.rounds(ctx, phaseFresh, r.open(perPhase), 3); err != nil {
		return err
	}
	return r.look(ctx, phaseFresh)
}

// more begins more conversations, and continues the first ones now and then.
func (r *events) more(ctx context.Context) error {
	before := r.opened
	for range 3 {
		if err := r.rounds(ctx, phaseEvict, r.open(perPhase/2), 2); err != nil {
			return err
		}
		short := slices.DeleteFunc(slices.Clone(before), func(t *talk) bool { return t.tokens >= longest })
		if err := r.rounds(ctx, phaseEvict, short, 1); err != nil {
			return err
		}
	}
	return r.look(ctx, phaseEvict)
}

// forget makes the first engine forget its cache between two turns of conversations. Engines
// refuse while a request runs.
func (r *events) forget(ctx context.Context) error {
	talks := r.open(perPhase)
	if err := r.rounds(ctx, phaseEvict, talks, 2); err != nil {
		return err
	}
	for tries := 0; ; tries++ {
		body, err := call(ctx, http.MethodPost, "http://"+r.router.engines[0]+r.o.kind.reset)
		if err == nil && !strings.Contains(string(body), "false") {
			break
		}
		if tries == 50 {
			return fmt.Errorf("the engine does not reset its cache: %s %w", body, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	r.reset = moment{name: "reset", worker: r.looks[0].workers[0].ID, from: time.Now()}
	err := r.rounds(ctx, phaseReset, talks, 3)
	r.reset.to = time.Now()
	return errors.Join(err, r.look(ctx, phaseReset))
}

// endAndStart restarts the last engine. Half of the conversations go on meanwhile if there
// is another one.
func (r *events) endAndStart(ctx context.Context) error {
	awake, asleep := r.open(perPhase/2), r.open(perPhase/2)
	if err := r.rounds(ctx, phaseEvict, slices.Concat(awake, asleep), 2); err != nil {
		return err
	}
	last := len(r.router.engines) - 1
	serves := make(chan error, 1)
	go func() { serves <- r.o.restarts(ctx) }()
	for err, over := error(nil), false; !over; {
		if last > 0 {
			if awake = slices.DeleteFunc(awake, func(t *talk) bool { return t.tokens >= longest }); len(awake) < 4 {
				awake = append(awake, r.open(4)...)
			}
			if err := r.rounds(ctx, phaseDown, awake, 1); err != nil {
				return err
			}
		}
		select {
		case err = <-serves:
			over = true
		case <-time.After(batch):
		}
		if err != nil {
			return fmt.Errorf("restarting the last engine: %w", err)
		}
	}
	r.back = moment{name: "restart", worker: r.looks[0].workers[last].ID, from: time.Now(), to: time.Now().Add(time.Hour)}
	if r.o.kind.exact {
		r.exactAfter, r.restart = r.router.await(ctx, time.Minute, (*worker).isExact)
	}
	if err := r.rounds(ctx, phaseBack, slices.Concat(asleep, r.open(perPhase/2)), 2); err != nil {
		return err
	}
	return r.look(ctx, phaseBack)
}

// look notes what the admin API shows, as soon as the streams are exact, if they can be.
func (r *events) look(ctx context.Context, phase string) error {
	if r.o.kind.exact {
		if _, err := r.router.await(ctx, toBeExact, (*worker).isExact); err != nil {
			return fmt.Errorf("after %s: %w", phase, err)
		}
	} else {
		select {
		case <-time.After(batch):
		case <-ctx.Done():
		}
	}
	list, err := r.router.workers(ctx)
	r.looks = append(r.looks, look{phase, list})
	fmt.Fprintf(os.Stderr, "after %s: %d requests\n", phase, len(r.turns))
	return err
}
