package main

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
)

// watchdogCommand is the argument with which this program is the watchdog.
const watchdogCommand = "watch-over-contenders"

// watchdog is a process that outlives this one, however this one ends. When its
// input ends, it kills the contenders that are left, with their descendants.
// Pdeathsig would not do, for it reaches a child, but not the child's children.
type watchdog struct {
	proc *process
	in   io.WriteCloser
}

func startWatchdog() (*watchdog, error) {
	cmd, err := selfCommand(watchdogCommand)
	if err != nil {
		return nil, err
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	proc, err := startProcess(cmd, nil)
	if err != nil {
		return nil, fmt.Errorf("starting the watchdog: %w", err)
	}
	return &watchdog{proc: proc, in: in}, nil
}

// watch has a process and its group killed when this process is.
func (w *watchdog) watch(pid int) {
	if w != nil {
		fmt.Fprintf(w.in, "%d\n", pid) //nolint:errcheck // without a watchdog the measurement is as good
	}
}

// forget undoes watch. It must come before the process is reaped, for then its
// id may become another's.
func (w *watchdog) forget(pid int) {
	if w != nil {
		fmt.Fprintf(w.in, "-%d\n", pid) //nolint:errcheck // as above
	}
}

func (w *watchdog) stop() {
	w.in.Close()
	w.proc.stop()
}

// watchOver is the watchdog's own work. It reads ids, with a minus those to be
// forgotten, until in ends.
func watchOver(in io.Reader) error {
	watched := make(map[int]bool)
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		pid, err := strconv.Atoi(lines.Text())
		if err != nil {
			return err
		}
		if pid < 0 {
			delete(watched, -pid)
		} else {
			watched[pid] = true
		}
	}
	for pid := range watched {
		killOrphans(pid)
	}
	return lines.Err()
}
