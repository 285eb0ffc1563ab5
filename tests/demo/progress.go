package main

import (
	"fmt"
	"io"
	"os"
	"time"
)

// ticker shows how far a run has come: in one line on a terminal, else in some.
type ticker struct {
	w        io.Writer
	name     string
	turns    int
	terminal bool
}

func newTicker(w io.Writer, name string, turns int) *ticker {
	t := &ticker{w: w, name: name, turns: turns}
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		t.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return t
}

// run shows it until the function that it returns is called.
func (t *ticker) run(y *tally, p *player) (stop func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	every := 5 * time.Second
	if t.terminal {
		every = 500 * time.Millisecond
	}
	go func() {
		defer close(ended)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				t.show(y, p)
			case <-end:
				t.show(y, p)
				if t.terminal {
					fmt.Fprintln(t.w)
				}
				return
			}
		}
	}()
	return func() {
		close(end)
		<-ended
	}
}

// show writes one line, about all and about what was asked lately.
func (t *ticker) show(y *tally, p *player) {
	now := p.since(p.zero, time.Now())
	y.mu.Lock()
	done, failed, broken, givenUp := len(y.samples), y.failed, y.broken, y.givenUp
	f := summarize(y.samples[max(0, done-100):])
	y.mu.Unlock()
	line := fmt.Sprintf("%-18s %4.0f s  %4d of %d answered, lately: hit ratio %3.0f %%, TTFT %s",
		t.name, now.Seconds(), done, t.turns, 100*f.hits, seconds(f.mean))
	if failed+broken > 0 {
		line += fmt.Sprintf("; failed %d, broken %d, given up %d", failed, broken, givenUp)
	}
	if t.terminal {
		fmt.Fprintf(t.w, "\r\x1b[K%s", line)
	} else {
		fmt.Fprintln(t.w, line)
	}
}
