package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// ownGroup makes a command the head of a process group of its own. The group
// can be ended as a whole, and a terminal's interrupt does not reach it during
// its measurement.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}

// killGroup ends the group that a child heads: with SIGTERM, or with SIGKILL.
// The child must not have been reaped.
func killGroup(p *os.Process, now bool) {
	signal := syscall.SIGTERM
	if now {
		signal = syscall.SIGKILL
	}
	_ = syscall.Kill(-p.Pid, signal) // it may have ended
}

// endGroup kills whom a child that has ended has left.
func endGroup(p *os.Process) { killGroup(p, true) }

// killOrphans kills a group whose parent has died.
func killOrphans(pid int) { _ = syscall.Kill(-pid, syscall.SIGKILL) }

// awaitExit waits until a child has ended, and leaves it to be reaped.
func awaitExit(p *os.Process) {
	const idIsPID = 1   // P_PID of waitid(2)
	var info [16]uint64 // siginfo_t, which is not looked at
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, idIsPID, uintptr(p.Pid),
			uintptr(unsafe.Pointer(&info)), syscall.WEXITED|syscall.WNOWAIT, 0, 0) //nolint:gosec // the call needs its address
		if errno != syscall.EINTR {
			return
		}
	}
}

// tick is the unit of times in /proc/<pid>/stat. It is the same on all systems
// that Linux gives to user space.
const tick = 10 * time.Millisecond

var errNoProcess = errors.New("there is no process")

// cpuTime returns the CPU time that a process and its descendants have taken
// so far, user and system. It is exact to the nanosecond where the kernel lets
// us read the processes' clocks, else to a tick for each process. The clocks of
// the processes that an earlier call has returned are read first, before the
// search for others takes its time.
func cpuTime(pid int, known []int) (sum time.Duration, pids []int, err error) {
	if pid == 0 {
		return 0, nil, errNoProcess
	}
	early := make(map[int]time.Duration, len(known))
	for _, k := range known {
		if t, ok := processClock(k); ok {
			early[k] = t
		}
	}
	tree, err := processTree(pid)
	if err != nil {
		return 0, nil, err
	}
	for _, s := range tree {
		pids = append(pids, s.pid)
		// of those that have ended there is no clock any more
		sum += s.reaped
		if t, ok := early[s.pid]; ok {
			sum += t
		} else if t, ok := processClock(s.pid); ok {
			sum += t
		} else {
			sum += s.own
		}
	}
	return sum, pids, nil
}

// processClock reads the CPU clock of a process, of all its threads, also of
// those that have ended. The id of the clock is the kernel's
// MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED), clock_getcpuclockid(3).
func processClock(pid int) (time.Duration, bool) {
	id := int32(^pid<<3 | 2)
	var ts syscall.Timespec
	_, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, uintptr(id), uintptr(unsafe.Pointer(&ts)), 0) //nolint:gosec // the call needs its address
	return time.Duration(ts.Nano()), errno == 0
}

// stat is what /proc/<pid>/stat says.
type stat struct {
	pid, parent int
	own         time.Duration // user and system time
	reaped      time.Duration // the same of children that have ended
}

// parseStat reads a line of /proc/<pid>/stat, proc_pid_stat(5).
func parseStat(line []byte) (s stat, err error) {
	// the command, in brackets, may hold anything, brackets and spaces included
	open, shut := bytes.IndexByte(line, '('), bytes.LastIndexByte(line, ')')
	if open < 0 || shut < open {
		return s, fmt.Errorf("stat: no command in %.80q", line)
	}
	fields := bytes.Fields(line[shut+1:])
	const state = 3 // the number of the first of fields
	if len(fields) <= 17-state {
		return s, fmt.Errorf("stat: too few fields in %.80q", line)
	}
	var n [4]int64
	for i := range n {
		if n[i], err = strconv.ParseInt(string(fields[14-state+i]), 10, 64); err != nil {
			return s, fmt.Errorf("stat: %w", err)
		}
	}
	if s.pid, err = strconv.Atoi(string(bytes.TrimSpace(line[:open]))); err != nil {
		return s, fmt.Errorf("stat: %w", err)
	}
	if s.parent, err = strconv.Atoi(string(fields[4-state])); err != nil {
		return s, fmt.Errorf("stat: %w", err)
	}
	s.own, s.reaped = time.Duration(n[0]+n[1])*tick, time.Duration(n[2]+n[3])*tick
	return s, nil
}

// processTree returns a process and its descendants.
func processTree(root int) ([]stat, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	children := make(map[int][]stat)
	var tree []stat
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		line, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue // it has ended meanwhile
		}
		s, err := parseStat(line)
		if err != nil {
			return nil, err
		}
		if s.pid == root {
			tree = []stat{s}
		}
		children[s.parent] = append(children[s.parent], s)
	}
	if tree == nil {
		return nil, errNoProcess
	}
	for i := 0; i < len(tree); i++ {
		tree = append(tree, children[tree[i].pid]...)
	}
	return tree, nil
}

// resetPeak lets the peak memory of a process and its descendants begin anew,
// where the kernel permits it.
func resetPeak(pid int) error {
	if pid == 0 {
		return nil
	}
	tree, err := processTree(pid)
	if err != nil {
		return err
	}
	for _, s := range tree {
		err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", s.pid), []byte("5"), 0)
		ended := errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH)
		if err != nil && !ended {
			return err
		}
	}
	return nil
}

// peakMiB returns the peak resident memory of a process and its descendants,
// summed up, in MiB.
func peakMiB(pid int) figure {
	if pid == 0 {
		return unknown
	}
	tree, err := processTree(pid)
	if err != nil {
		return unknown
	}
	sum := int64(0)
	for _, s := range tree {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.pid))
		if err != nil {
			continue
		}
		kib, ok := parsePeak(status)
		if !ok {
			return unknown
		}
		sum += kib
	}
	return figure(float64(sum) / 1024)
}

// parsePeak returns VmHWM of /proc/<pid>/status, in KiB.
func parsePeak(status []byte) (int64, bool) {
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte("VmHWM:")); ok {
			kib, err := strconv.ParseInt(string(bytes.TrimSpace(bytes.TrimSuffix(bytes.TrimSpace(rest), []byte("kB")))), 10, 64)
			return kib, err == nil
		}
	}
	return 0, false
}
