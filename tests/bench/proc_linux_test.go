package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestStatIsParsed(t *testing.T) {
	line := []byte("4711 (a (b) c d) S 12 4711 1 0 -1 4194304 98 0 0 0 250 13 40 7 20 0 1 0 1160205 3133440 380 18446744073709551615\n")
	s, err := parseStat(line)
	want := stat{pid: 4711, parent: 12, own: 2630 * time.Millisecond, reaped: 470 * time.Millisecond}
	if err != nil || s != want {
		t.Errorf("got %+v, %v, want %+v", s, err, want)
	}
	for _, bad := range []string{"", "1 S 2", "1 (x) S 2 3", "x (x) S 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6"} {
		if _, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestPeakIsParsed(t *testing.T) {
	if kib, ok := parsePeak([]byte("Name:\tx\nVmPeak:\t  9 kB\nVmHWM:\t  123456 kB\nVmRSS:\t 7 kB\n")); !ok || kib != 123456 {
		t.Errorf("got %d, %t", kib, ok)
	}
	if _, ok := parsePeak([]byte("Name:\tx\n")); ok {
		t.Error("a kernel thread has a peak")
	}
	if mib := peakMiB(os.Getpid()); !mib.known() || mib < 1 {
		t.Errorf("this process has a peak of %v MiB", mib)
	}
}

// The CPU time is the tree's: of a shell's child while it lives, and after.
func TestCPUTimeCountsDescendants(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "(i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; exit 0); cat; exit 0")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	p, err := startProcess(cmd, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	deadline := time.Now().Add(20 * time.Second)
	var pids []int
	for last := time.Duration(0); ; {
		took, known, err := cpuTime(p.pid(), pids)
		if err != nil {
			t.Fatal(err)
		}
		if took < last-2*tick {
			t.Fatalf("CPU time fell from %s to %s", last, took)
		}
		last, pids = took, known
		tree, err := processTree(p.pid())
		if err != nil {
			t.Fatal(err)
		}
		if took >= tick && len(tree) == 2 && isCat(tree[1].pid) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("CPU time %s, processes %v", took, tree)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func isCat(pid int) bool {
	line, _ := os.ReadFile("/proc/" + itoa(pid) + "/stat")
	return bytes.Contains(line, []byte("(cat)"))
}

func TestStopEndsDescendants(t *testing.T) {
	p, err := startProcess(exec.Command("/bin/sh", "-c", "trap '' TERM; cat /dev/zero > /dev/null & exec cat /dev/zero > /dev/null"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var tree []stat
	for deadline := time.Now().Add(10 * time.Second); len(tree) < 2; {
		if tree, err = processTree(p.pid()); err != nil || time.Now().After(deadline) {
			t.Fatalf("processes %v, %v", tree, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
	p.stop()
	awaitGone(t, tree[1].pid)
}

// awaitGone waits until a process has ended.
func awaitGone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		line, err := os.ReadFile("/proc/" + itoa(pid) + "/stat")
		if err != nil || bytes.Contains(line, []byte(") Z ")) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still there: %s", line)
		}
	}
}

// A process that ends by itself takes its descendants with it, and its id is
// not signalled once it is reaped.
func TestEndOfAProcessEndsDescendants(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "sleep 60 & echo $!; read x; exit 0")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p, err := startProcess(cmd, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	left := 0
	for deadline := time.Now().Add(10 * time.Second); left == 0; time.Sleep(5 * time.Millisecond) {
		if left, _ = strconv.Atoi(strings.TrimSpace(p.output())); time.Now().After(deadline) {
			t.Fatal("the shell says nothing")
		}
	}
	in.Close()
	if !p.endsWithin(10 * time.Second) {
		t.Fatal("it does not end")
	}
	awaitGone(t, left)
	if p.mu.Lock(); !p.over {
		t.Error("its group may still be signalled")
	}
	p.mu.Unlock()
}

// A bench that is killed leaves neither a contender nor what that has started.
func TestContendersDoNotOutliveAKilledBench(t *testing.T) {
	bench, err := selfCommand(killedBench)
	if err != nil {
		t.Fatal(err)
	}
	out, err := bench.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := bench.Start(); err != nil {
		t.Fatal(err)
	}
	defer bench.Wait() //nolint:errcheck // it is killed
	defer bench.Process.Kill()
	var watchdogPID, contenderPID, descendant int
	if _, err := fmt.Fscan(out, &watchdogPID, &contenderPID, &descendant); err != nil {
		t.Fatal(err)
	}
	if err := bench.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, pid := range []int{contenderPID, descendant, watchdogPID} {
		awaitGone(t, pid)
	}
}

// The peak of a process that held much memory is what it holds now, once it is
// reset.
func TestPeakIsReset(t *testing.T) {
	cmd, err := selfCommand(allocateAndFree)
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	p, err := startProcess(cmd, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	for deadline := time.Now().Add(20 * time.Second); !strings.Contains(p.output(), "freed"); time.Sleep(5 * time.Millisecond) {
		if p.ended() || time.Now().After(deadline) {
			t.Fatalf("it says %q", p.output())
		}
	}
	before := peakMiB(p.pid())
	if !before.known() || before < allocatedMiB {
		t.Fatalf("a peak of %v MiB after %d were held", before, allocatedMiB)
	}
	if err := resetPeak(p.pid()); errors.Is(err, os.ErrPermission) {
		t.Skip("the kernel does not permit it: ", err)
	} else if err != nil {
		t.Fatal(err)
	}
	if after := peakMiB(p.pid()); !after.known() || after > before-allocatedMiB/2 {
		t.Errorf("a peak of %v MiB, before the reset of %v", after, before)
	}
}

func TestResetPeakOfNobody(t *testing.T) {
	if err := resetPeak(0); err != nil {
		t.Errorf("no process: %v", err)
	}
	if err := resetPeak(1 << 30); err == nil {
		t.Error("a process that is not there has its peak reset")
	}
}
