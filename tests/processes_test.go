package tests

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
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
	"TestSessionLeavesATargetThatForgot",
	"TestSessionStaysWhileThatIsWorthIt",
	"TestOtherClientsAreSeen",
	"TestClientsThatLeaveTheirSessions",
	"TestSessionsOfEnginesNeverLeave",
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
	to       io.Writer // what the processes print

	mu     sync.Mutex
	failed []string // the tests of processes in which one failed
}

// verdict is the last word of a process, of which there is to be one in all.
var verdict = regexp.MustCompile(`(?m)^\x16?(PASS|FAIL|testing: warning: no tests to run)\n`)

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

// ended passes on what a process printed, and notes whether it failed.
func (p *processes) ended(names []string, out []byte, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.to.Write(verdict.ReplaceAll(out, nil))
	if len(out) > 0 && !bytes.HasSuffix(out, []byte("\n")) {
		fmt.Fprintln(p.to)
	}
	if err != nil {
		p.failed = append(p.failed, fmt.Sprintf("%s (%v)", strings.Join(names, " "), err))
	}
}
