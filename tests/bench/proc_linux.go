package main

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// cpuTime returns the CPU time that processes have taken so far, user and system, of
// all their threads. It reads the processes' clocks, whose ids are the kernel's
// MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED), see clock_getcpuclockid(3).
func cpuTime(pids []int) (sum time.Duration, err error) {
	for _, pid := range pids {
		id := int32(^pid<<3 | 2)
		var ts syscall.Timespec
		_, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, uintptr(id),
			uintptr(unsafe.Pointer(&ts)), 0) //nolint:gosec // the call needs its address
		if errno != 0 {
			return 0, fmt.Errorf("reading the CPU clock of process %d: %w", pid, errno)
		}
		sum += time.Duration(ts.Nano())
	}
	return sum, nil
}

// processTree returns a process and its descendants.
func processTree(root int) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	children := make(map[int][]int)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		line, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue // it has ended meanwhile
		}
		// The command, in brackets, may hold anything. The state and the parent follow it.
		fields := bytes.Fields(line[bytes.LastIndexByte(line, ')')+1:])
		if len(fields) < 2 {
			continue
		}
		if parent, err := strconv.Atoi(string(fields[1])); err == nil {
			children[parent] = append(children[parent], pid)
		}
	}
	tree := []int{root}
	for i := 0; i < len(tree); i++ {
		tree = slices.Concat(tree, children[tree[i]])
	}
	return tree, nil
}
