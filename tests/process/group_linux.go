package process

import (
	"os"
	"os/exec"
	"syscall"
)

// ownGroup makes a command the head of a process group of its own. The group
// can be ended as a whole, and a terminal's interrupt does not reach it during
// its measurement. It ends with this process, however this one ends.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// killGroup ends the group that a child heads or headed: with SIGTERM, or with SIGKILL.
func killGroup(p *os.Process, now bool) {
	signal := syscall.SIGTERM
	if now {
		signal = syscall.SIGKILL
	}
	_ = syscall.Kill(-p.Pid, signal) // it may have ended
}
