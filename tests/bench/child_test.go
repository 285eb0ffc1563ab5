package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"
	"time"
)

const (
	// killedBench starts a watchdog and a contender, writes their ids, and waits
	// for its end.
	killedBench = "test-killed-bench"
	// allocateAndFree holds much memory, gives it back, and says so.
	allocateAndFree = "test-allocate-and-free"
	// mortalRouter has a port, an upstream, and the number of requests after
	// which it ends.
	mortalRouter = "test-mortal-router"
)

// allocatedMiB is how much allocateAndFree holds.
const allocatedMiB = 96

// runTestChild does the work of one of the tests' processes, if the arguments
// are those of one.
func runTestChild(args []string) (child bool, err error) {
	if len(args) == 0 {
		return false, nil
	}
	switch args[0] {
	case killedBench:
		return true, beKilled()
	case allocateAndFree:
		if err := holdMemory(allocatedMiB << 20); err != nil {
			return true, err
		}
		fmt.Println("freed")
		_, err := io.Copy(io.Discard, os.Stdin)
		return true, err
	case mortalRouter:
		return true, routeAndDie(args[1], args[2], args[3])
	}
	return false, nil
}

func beKilled() error {
	dog, err := startWatchdog()
	if err != nil {
		return err
	}
	p, err := startProcess(exec.Command("/bin/sh", "-c", "sleep 120 & echo $!; wait"), dog)
	if err != nil {
		return err
	}
	for p.output() == "" {
		time.Sleep(time.Millisecond)
	}
	fmt.Println(dog.proc.pid(), p.pid(), p.output())
	time.Sleep(time.Minute) // it is killed long before
	p.stop()
	return nil
}

func routeAndDie(port, upstream, requests string) error {
	last, err := strconv.ParseInt(requests, 10, 64)
	if err != nil {
		return err
	}
	var seen atomic.Int64
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: upstream})
	srv := &http.Server{Addr: "127.0.0.1:" + port, ReadHeaderTimeout: time.Minute}
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if seen.Add(1) > last {
			fmt.Println("enough of it")
			// The race detector would let os.Exit take a second.
			if self, err := os.FindProcess(os.Getpid()); err == nil {
				_ = self.Kill()
			}
			select {}
		}
		proxy.ServeHTTP(w, r)
	})
	return srv.ListenAndServe()
}
