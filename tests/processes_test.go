package tests

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// waiting are tests that do nothing for most of their time, those that take
// longest first. Each has a process of its own.
var waiting = []string{
	"TestFaultTable",
	"TestRestartWithinAPoll",
	"TestSessionsOfHungEngines",
	"TestHungEnginesAreFound",
	"TestWorkersAreKnownWithoutRequests",
	"TestHungRequestsMoveWhenThereIsRoom",
	"TestReloadEverySecond",
	"TestUnknownServerIsNotAskedForItsHealth",
	"TestWorkerThatWantsAKeyIsNoIncident",
	"TestMemoryReturnsAfterABurst",
	"TestStreamsSurviveReload",
	"TestRefusedConnectionLosesTheCache",
	"TestScaleByDNS",
	"TestIllegibleEngineIsNoBlackHole",
	"TestDeadWorkerIsNotAvailable",
	"TestRequestsGoToEnginesWithTheirModel",
	"TestKeysGoToTheirOwnWorkersOnly",
	"TestEngineThatComesLate",
	"TestNobodyIsTurnedAwayWhileAWorkerHasRoom",
	"TestRequestsMeetReloads",
	"TestRestartInTheMiddle",
}

const (
	// waitingLanes is how many of them run at the same time, beside restLanes processes
	// of the others.
	waitingLanes, restLanes = 4, 2
	// together is how many of the others share a process. What all pools of a
	// process have counted is on each page of its metrics, and the tests read
	// these all the time.
	together = 12
)

// TestMain runs the tests in several processes, so that not all have to wait for
// each of them. If some are asked for by name, these run here, one after the
// other.
func TestMain(m *testing.M) {
	if file := os.Getenv(childConfig); file != "" {
		runChild(file)
	}
	flag.Parse()
	// Some tests read files of another module, whose changes go does not notice. Without a
	// log of the files that were read, it keeps no result.
	_ = flag.Set("test.testlogfile", "")
	args, several := processArgs()
	if !several {
		os.Exit(m.Run())
	}
	if err := runProcesses(args); err != nil {
		fmt.Println(err)
		fmt.Println("FAIL")
		os.Exit(1)
	}
	fmt.Println("PASS")
	os.Exit(0)
}

// processArgs returns the flags that each process gets, and whether there are to
// be several.
func processArgs() (args []string, several bool) {
	several = testing.CoverMode() == ""
	flag.Visit(func(f *flag.Flag) {
		switch name := strings.TrimPrefix(f.Name, "test."); {
		case name == "run", name == "list", name == "bench", strings.HasPrefix(name, "fuzz"), strings.HasSuffix(name, "profile"), name == "trace":
			several = several && f.Value.String() == ""
		case name != "timeout" && name != "testlogfile":
			args = append(args, "-"+f.Name+"="+f.Value.String())
		}
	})
	return args, several
}

// runProcesses runs all tests. What they print comes out when their process has
// ended.
func runProcesses(args []string) error {
	binary, err := os.Executable()
	if err != nil {
		return err
	}
	list, err := exec.Command(binary, "-test.list=.").Output()
	if err != nil {
		return fmt.Errorf("listing the tests: %w", err)
	}
	others := strings.Fields(string(list))
	apart := make(chan []string, len(waiting))
	for _, name := range waiting {
		i := slices.Index(others, name)
		if i < 0 {
			return fmt.Errorf("there is no test %s", name)
		}
		others = slices.Delete(others, i, i+1)
		apart <- []string{name}
	}
	close(apart)
	rest := make(chan []string, len(others))
	for names := range slices.Chunk(others, together) {
		rest <- names
	}
	close(rest)

	p := processes{binary: binary, args: args, to: os.Stdout}
	if d := flag.Lookup("test.timeout").Value.(flag.Getter).Get().(time.Duration); d > 0 {
		p.deadline = time.Now().Add(d - 5*time.Second)
	}
	var lanes sync.WaitGroup
	for range restLanes {
		lanes.Go(func() { p.lane(rest) })
	}
	for range waitingLanes {
		lanes.Go(func() { p.lane(apart) })
	}
	lanes.Wait()
	p.runAgain()
	if len(p.failed) > 0 {
		return fmt.Errorf("failed: %s", strings.Join(p.failed, ", "))
	}
	return nil
}

// processes are those that the tests run in.
type processes struct {
	binary   string
	args     []string
	deadline time.Time // zero: none
	again    bool      // failures are final
	to       io.Writer // what the processes print

	mu     sync.Mutex
	failed []string // the tests of processes in which one failed
	late   []late   // failures that may come from a busy machine
}

// late are tests that failed beside others, and what their process printed.
type late struct {
	tests []string
	out   []byte
}

// mostAgain is how many tests run again alone. If more fail, that is not the machine.
const mostAgain = 4

// failedTest is the line of a failed test, not of its parts.
var failedTest = regexp.MustCompile(`(?m)^\x16?--- FAIL: (\w+) `)

// againFile names a file, in the environment, that gets the names of the tests that run again.
// go test shows nothing of a package that passes in the end.
const againFile = "KVROUTER_AGAIN"

// runAgain runs tests again that failed beside others, one after the other on a machine that
// is idle now: many of them measure times. Races, panics and processes that did not run all
// their tests do not get this chance.
func (p *processes) runAgain() {
	n := 0
	for _, l := range p.late {
		n += len(l.tests)
	}
	for _, l := range p.late {
		p.print(l.out)
		if n <= mostAgain {
			p.note("failed beside others, and runs again alone: " + strings.Join(l.tests, " ") + "\n")
			queue := make(chan []string, len(l.tests))
			for _, name := range l.tests {
				queue <- []string{name}
			}
			close(queue)
			again := processes{binary: p.binary, args: p.args, deadline: p.deadline, to: p.to, again: true}
			if again.lane(queue); len(again.failed) == 0 {
				continue
			}
		}
		p.failed = append(p.failed, l.tests...)
	}
}

// note prints a line, and adds it to againFile.
func (p *processes) note(line string) {
	io.WriteString(p.to, line)
	name := os.Getenv(againFile)
	if name == "" {
		return
	}
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		fmt.Fprintln(p.to, err)
		return
	}
	defer f.Close()
	io.WriteString(f, line)
}

// lane runs one process after the other.
func (p *processes) lane(queue <-chan []string) {
	for names := range queue {
		limit := time.Duration(0)
		if !p.deadline.IsZero() {
			limit = max(time.Until(p.deadline), time.Second)
		}
		cmd := exec.Command(p.binary, append(slices.Clip(p.args), "-test.timeout="+limit.String(), "-test.run=^("+strings.Join(names, "|")+")$")...)
		out, err := cmd.CombinedOutput()
		p.ended(names, out, err)
	}
}

// verdict is the last word of a process, of which there is to be one in all.
var verdict = regexp.MustCompile(`(?m)^\x16?(PASS|FAIL|testing: warning: no tests to run)\n`)

// ended passes on what a process printed.
func (p *processes) ended(names []string, out []byte, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		var tests []string
		for _, m := range failedTest.FindAllSubmatch(out, -1) {
			tests = append(tests, string(m[1]))
		}
		var exit *exec.ExitError
		all := errors.As(err, &exit) && exit.ExitCode() == 1 && bytes.HasSuffix(out, []byte("FAIL\n")) && !slices.Contains(p.args, "-test.failfast=true")
		if !p.again && all && len(tests) > 0 && !hopeless.Match(out) {
			p.late = append(p.late, late{tests, out})
			return
		}
		p.failed = append(p.failed, fmt.Sprintf("%s (%v)", strings.Join(names, " "), err))
	}
	p.print(out)
}

// hopeless is in the output of processes whose tests do not run again.
var hopeless = regexp.MustCompile(`DATA RACE|panic: |panicked|fatal error: `)

// print passes on what a process printed.
func (p *processes) print(out []byte) {
	p.to.Write(verdict.ReplaceAll(out, nil))
	if len(out) > 0 && !bytes.HasSuffix(out, []byte("\n")) {
		fmt.Fprintln(p.to)
	}
}

// TestFailuresRunAgain runs shell scripts in place of the tests.
func TestFailuresRunAgain(t *testing.T) {
	const failed = `echo "--- FAIL: TestA (0.1s)"; `
	for name, c := range map[string]struct {
		script string // of a process that runs TestB, too
		alone  string
		queues int
		failed bool
	}{
		"passes alone":   {failed + "echo FAIL; exit 1", "echo PASS", 1, false},
		"fails alone":    {failed + "echo FAIL; exit 1", failed + "echo FAIL; exit 1", 1, true},
		"race":           {"echo WARNING: DATA RACE; " + failed + "echo FAIL; exit 1", "echo PASS", 1, true},
		"no test failed": {"exit 2", "echo PASS", 1, true},
		"killed":         {failed + "kill -9 $$", "echo PASS", 1, true},
		"ended early":    {failed + "exit 1", "echo PASS", 1, true},
		"too many":       {failed + failed + failed + "echo FAIL; exit 1", "echo PASS", 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			binary, again := filepath.Join(dir, "tests"), filepath.Join(dir, "again")
			t.Setenv(againFile, again)
			script := "#!/bin/sh\ncase $* in *TestB*) " + c.script + ";; *) " + c.alone + ";; esac\n"
			if err := os.WriteFile(binary, []byte(script), 0o700); err != nil { //nolint:gosec // it is a program
				t.Fatal(err)
			}
			queue := make(chan []string, c.queues)
			for range c.queues {
				queue <- []string{"TestA", "TestB"}
			}
			close(queue)
			var printed bytes.Buffer
			p := processes{binary: binary, deadline: time.Now().Add(time.Minute), to: &printed}
			p.lane(queue)
			if p.runAgain(); (len(p.failed) > 0) != c.failed {
				t.Errorf("failed: %v", p.failed)
			}
			if name != "no test failed" && !strings.Contains(printed.String(), "--- FAIL: TestA") {
				t.Errorf("what the first run printed is lost: %s", &printed)
			}
			noted, _ := os.ReadFile(again)
			if ran := name == "passes alone" || name == "fails alone"; strings.Contains(string(noted), "TestA") != ran {
				t.Errorf("noted: %q", noted)
			}
		})
	}
}
