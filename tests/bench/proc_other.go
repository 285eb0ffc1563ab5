//go:build !linux

package main

import (
	"errors"
	"os"
	"os/exec"
	"time"
)

var errNotAvailable = errors.New("they are read from Linux' /proc")

func ownGroup(*exec.Cmd) {}

// killGroup ends the process alone: there are no groups. It does nothing if the
// process is reaped.
func killGroup(p *os.Process, now bool) {
	if now || p.Signal(os.Interrupt) != nil {
		_ = p.Kill()
	}
}

func endGroup(*os.Process) {}

func killOrphans(pid int) {
	if p, err := os.FindProcess(pid); err == nil {
		_ = p.Kill()
	}
}

// awaitExit reaps the process, too. What comes after it finds it ended.
func awaitExit(p *os.Process) { _, _ = p.Wait() }

func cpuTime(int, []int) (time.Duration, []int, error) { return 0, nil, errNotAvailable }

func resetPeak(int) error { return errNotAvailable }

func peakMiB(int) figure { return unknown }
