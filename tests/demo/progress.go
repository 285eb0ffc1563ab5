package main

import (
	"fmt"
	"io"
	"os"
	"time"
)

// follow shows how far the runs have come until the function that it returns is
// called: in one line on a terminal, else in some.
func follow(w io.Writer, runs []*run, speed float64) (stop func()) {
	every, terminal := 5*time.Second, false
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		if terminal = err == nil && info.Mode()&os.ModeCharDevice != 0; terminal {
			every = 500 * time.Millisecond
		}
	}
	end, ended := make(chan struct{}), make(chan struct{})
	began := time.Now()
	go func() {
		defer close(ended)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				show(w, runs, time.Since(began), speed, terminal)
			case <-end:
				if terminal {
					fmt.Fprint(w, "\r\x1b[K")
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

// show writes one line.
func show(w io.Writer, runs []*run, passed time.Duration, speed float64, terminal bool) {
	answered, all, failed := 0, 0, 0
	for _, r := range runs {
		r.mu.Lock()
		answered, failed = answered+len(r.samples), failed+r.failed+r.broken
		r.mu.Unlock()
		all += r.load.requests()
	}
	line := fmt.Sprintf("%2.0f s (%.0f s of the engines): %d of %d requests answered, %d failed attempts of all contenders",
		passed.Seconds(), passed.Seconds()*speed, answered, all, failed)
	if terminal {
		fmt.Fprintf(w, "\r\x1b[K%s", line)
	} else {
		fmt.Fprintln(w, line)
	}
}
