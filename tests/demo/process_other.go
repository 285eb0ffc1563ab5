//go:build !unix

package main

import "os/exec"

func ownGroup(*exec.Cmd) {}

// endGroup ends the command alone: there are no groups here.
func endGroup(cmd *exec.Cmd, _ bool) { cmd.Process.Kill() } //nolint:errcheck,gosec // it may have ended
