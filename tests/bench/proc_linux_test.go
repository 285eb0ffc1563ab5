package main

import (
	"bytes"
	"os"
	"os/exec"
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
	p, err := startProcess(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	deadline := time.Now().Add(20 * time.Second)
	for last := time.Duration(0); ; {
		took, err := cpuTime(p.pid())
		if err != nil {
			t.Fatal(err)
		}
		if took < last-2*tick {
			t.Fatalf("CPU time fell from %s to %s", last, took)
		}
		last = took
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
	p, err := startProcess(exec.Command("/bin/sh", "-c", "trap '' TERM; cat /dev/zero > /dev/null & exec cat /dev/zero > /dev/null"))
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
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		line, err := os.ReadFile("/proc/" + itoa(tree[1].pid) + "/stat")
		if err != nil || bytes.Contains(line, []byte(") Z ")) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still there: %s", line)
		}
	}
}
