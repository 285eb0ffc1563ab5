//go:build !linux

package process

import (
	"os"
	"os/exec"
)

func ownGroup(*exec.Cmd) {}

// killGroup ends the process alone.
func killGroup(p *os.Process, now bool) {
	if now || p.Signal(os.Interrupt) != nil {
		_ = p.Kill()
	}
}
