//go:build !linux

package main

import (
	"errors"
	"os"
	"os/exec"
	"time"
)

// cpuAvailable says that CPU time and memory of other processes can be read.
const cpuAvailable = false

var errNotAvailable = errors.New("not available on this system")

func ownGroup(*exec.Cmd) {}

// killGroup ends the process alone: there are no groups.
func killGroup(pid int, now bool) {
	p, err := os.FindProcess(pid)
	if err != nil {
		return
	}
	if now {
		_ = p.Kill()
		return
	}
	if p.Signal(os.Interrupt) != nil {
		_ = p.Kill()
	}
}

func cpuTime(int) (time.Duration, error) { return 0, errNotAvailable }

func resetPeak(int) {}

func peakMiB(int) figure { return unknown }
