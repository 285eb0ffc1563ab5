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

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
)

// waiting are tests that take seconds, those that take longest first. Most of them do nothing
// for most of their time. Each has a process of its own. -short leaves them out.
var waiting = []string{
	"TestFaultTable",
	"TestShareFaults",
	"TestFaultsOfPhases",
	"TestOfficialPythonClients",
	"TestBadWorkersAreFound",
	"TestStormOfPhases",
	"TestHungEnginesAreFound",
	"TestFrozenEngineHasTheLastStreams",
	"TestPrefillWorkerVanishes",
	"TestOfficialNodeClients",
	"TestRestartInTheMiddle",
	"TestPrefillWorkerVanishesLater",
	"TestCommands",
	"TestSlowTransfer",
	"TestIndexIsTheEnginesCaches",
	"TestEngineSessionsOverRouters",
	"TestManifoldRequestsLeaveBoundedTraces",
	"TestLimitsOfRouters",
	"TestRoutersActAsOne",
	"TestWorkerThatAcceptsAndNeverAnswersIsNotAvailable",
	"TestStreamsSurviveReload",
	"TestRefusedConnectionLosesTheCache",
	"TestOverloadRefusesWhatWouldBeLate",
	"TestAffinityModes",
	"TestOwnErrorsHaveTheAPIsShape",
	"TestEachAPIReturnsToItsEngine",
	"TestWorkerBehindAForwardProxyIsNotMarkedDown",
	"TestWorkersAreKnownWithoutRequests",
	"TestFailedPhasesCountOnce",
	"TestWhatEndsASpeculativePrefill",
	"TestSessionLeavesAHomeThatForgot",
	"TestSessionStaysWhileThatIsWorthIt",
	"TestOtherClientsAreSeen",
	"TestClientsThatLeaveTheirSessions",
	"TestSessionsOfEnginesNeverLeave",
	"TestConversationsReturnToTheirEngine",
	"TestNobodyIsTurnedAwayWhileAWorkerHasRoom",
	"TestKeysGoToTheirOwnWorkersOnly",
	"TestErrorRoutesGetTheRequest",
	"TestFirstRequestsOfASessionGoToOneWorker",
	"TestDrainUnderLoad",
	"TestClosesAreRepeated",
	"TestRequestsMeetReloads",
	"TestTurnsOfASessionComeOneByOne",
	"TestRefusedConfigurationWritesNothing",
	"TestRequestsGoToEnginesWithTheirModel",
}

const (
	// waitingLanes is how many of waiting run at the same time, beside restLanes processes
	// of the others. When no more wait, these lanes have the others, too.
	waitingLanes, restLanes = 5, 2
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
	if os.Getenv(asCaddy) != "" {
		caddycmd.Main() // with the arguments of this process
		os.Exit(0)
	}
	if addr := os.Getenv(asEngine); addr != "" {
		runEngine(addr)
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
		if i := slices.Index(others, name); i >= 0 {
			others = slices.Delete(others, i, i+1)
			if !testing.Short() {
				apart <- []string{name}
			}
		}
	}
	close(apart)
	rest := make(chan []string, len(others))
	for names := range slices.Chunk(others, together) {
		rest <- names
	}
	close(rest)

	temp, err := os.MkdirTemp("", "kvr") // a process that is killed does not remove what it has made
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	p := processes{binary: binary, args: args, to: os.Stdout, env: append(os.Environ(), "TMPDIR="+temp)}
	if d := flag.Lookup("test.timeout").Value.(flag.Getter).Get().(time.Duration); d > 0 {
		p.deadline = time.Now().Add(d - 5*time.Second)
	}
	var lanes sync.WaitGroup
	for range restLanes {
		lanes.Go(func() { p.lane(rest) })
	}
	for range waitingLanes {
		lanes.Go(func() { p.lane(apart); p.lane(rest) })
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
	env      []string
	deadline time.Time // zero: none
	again    bool      // failures are final
	to       io.Writer // what the processes print

	mu     sync.Mutex
	failed []string // the tests of processes in which one failed
	late   []string // tests that failed beside others, maybe as the machine was busy
}

// mostAgain is how many tests run again alone. If more fail, that is not the machine.
const mostAgain = 4

// againFile names a file, in the environment, that gets the names of the tests that run again. Without it
// none does: go test shows nothing of a package that passes in the end.
const againFile = "KVROUTER_AGAIN"

var (
	// failedTest is the line of a failed test, not of its parts.
	failedTest = regexp.MustCompile(`(?m)^\x16?--- FAIL: (\w+) `)
	// hopeless is in the output of processes whose tests do not run again.
	hopeless = regexp.MustCompile(`DATA RACE|panic: |panicked|fatal error: `)
	// verdict is the last word of a process, of which there is to be one in all.
	verdict = regexp.MustCompile(`(?m)^\x16?(PASS|FAIL|testing: warning: no tests to run)\n`)
)

// runAgain runs tests again that failed beside others, one after the other on a machine that
// is idle now: many of them measure times.
func (p *processes) runAgain() {
	if len(p.late) > mostAgain || os.Getenv(againFile) == "" {
		p.failed = append(p.failed, p.late...)
		return
	}
	again := processes{binary: p.binary, args: p.args, deadline: p.deadline, to: p.to, again: true}
	queue := make(chan []string, len(p.late))
	for _, name := range p.late {
		p.note("failed beside others, and runs again alone: " + name + "\n")
		queue <- []string{name}
	}
	close(queue)
	again.lane(queue)
	p.failed = append(p.failed, again.failed...)
}

// note prints a line, and adds it to againFile.
func (p *processes) note(line string) {
	io.WriteString(p.to, line)
	if f, err := os.OpenFile(os.Getenv(againFile), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
		defer f.Close()
		io.WriteString(f, line)
	}
}

// lane runs one process after the other.
func (p *processes) lane(queue <-chan []string) {
	for names := range queue {
		limit := time.Duration(0)
		if !p.deadline.IsZero() {
			limit = max(time.Until(p.deadline), time.Second)
		}
		cmd := exec.Command(p.binary, append(slices.Clip(p.args), "-test.timeout="+limit.String(), "-test.run=^("+strings.Join(names, "|")+")$")...)
		cmd.Env = p.env
		out, err := cmd.CombinedOutput()
		p.ended(names, out, err)
	}
}

// ended passes on what a process printed, and notes which tests failed. Races, panics and
// processes that did not run all their tests get no second chance.
func (p *processes) ended(names []string, out []byte, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.to.Write(verdict.ReplaceAll(out, nil))
	if len(out) > 0 && !bytes.HasSuffix(out, []byte("\n")) {
		fmt.Fprintln(p.to)
	}
	if err == nil {
		return
	}
	var exit *exec.ExitError
	all := errors.As(err, &exit) && exit.ExitCode() == 1 && bytes.HasSuffix(out, []byte("FAIL\n")) && !slices.Contains(p.args, "-test.failfast=true")
	tests := failedTest.FindAllSubmatch(out, -1)
	if p.again || !all || len(tests) == 0 || hopeless.Match(out) {
		p.failed = append(p.failed, fmt.Sprintf("%s (%v)", strings.Join(names, " "), err))
		return
	}
	for _, m := range tests {
		p.late = append(p.late, string(m[1]))
	}
}

// TestFailuresRunAgain runs shell scripts in place of the tests.
func TestFailuresRunAgain(t *testing.T) {
	const failed = `echo "--- FAIL: TestA (0.1s)"; `
	for name, c := range map[string]struct {
		script, alone string
		failed, noted bool
	}{
		"passes alone": {failed + "echo FAIL; exit 1", "echo PASS", false, true},
		"fails alone":  {failed + "echo FAIL; exit 1", failed + "echo FAIL; exit 1", true, true},
		"race":         {"echo WARNING: DATA RACE; " + failed + "echo FAIL; exit 1", "echo PASS", true, false},
		"ended early":  {failed + "kill -9 $$", "echo PASS", true, false},
		"too many":     {strings.Repeat(failed, 5) + "echo FAIL; exit 1", "echo PASS", true, false},
		"not wanted":   {failed + "echo FAIL; exit 1", "echo PASS", true, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			binary, again := filepath.Join(dir, "tests"), filepath.Join(dir, "again")
			if t.Setenv(againFile, again); name == "not wanted" {
				t.Setenv(againFile, "")
			}
			script := "#!/bin/sh\ncase $* in *TestB*) " + c.script + ";; *) " + c.alone + ";; esac\n"
			if err := os.WriteFile(binary, []byte(script), 0o700); err != nil { //nolint:gosec // it is a program
				t.Fatal(err)
			}
			queue := make(chan []string, 1)
			queue <- []string{"TestA", "TestB"}
			close(queue)
			var printed bytes.Buffer
			p := processes{binary: binary, deadline: time.Now().Add(time.Minute), to: &printed}
			p.lane(queue)
			p.runAgain()
			noted, _ := os.ReadFile(again)
			if (len(p.failed) > 0) != c.failed || strings.Contains(string(noted), "TestA") != c.noted || !strings.Contains(printed.String(), "--- FAIL: TestA") {
				t.Errorf("failed: %v, noted: %q, printed: %s", p.failed, noted, &printed)
			}
		})
	}
}
