package main

import (
	"fmt"
	"io"
	"time"
)

// follow shows how far the runs have come, every 5 seconds, until the function that it
// returns is called.
func follow(w io.Writer, runs []*run, speed float64) (stop func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	began := time.Now()
	go func() {
		defer close(ended)
		tick := time.NewTicker(5 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				show(w, runs, time.Since(began), speed)
			case <-end:
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
func show(w io.Writer, runs []*run, passed time.Duration, speed float64) {
	answered, all, failed := 0, 0, 0
	for _, r := range runs {
		r.mu.Lock()
		answered, failed = answered+len(r.samples), failed+r.failed+r.broken
		r.mu.Unlock()
		all += r.load.requests()
	}
	fmt.Fprintf(w, "%2.0f s (%.0f s of the engines): %d of %d requests answered, %d failed attempts of all contenders\n",
		passed.Seconds(), passed.Seconds()*speed, answered, all, failed)
}
