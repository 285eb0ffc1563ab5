package events

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// python returns an interpreter with pyzmq, which brings libzmq. It installs pyzmq once into
// the user's cache, and skips the test if that is not possible.
var python = sync.OnceValues(func() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "kvrouter-pyzmq")
	bin := filepath.Join(dir, "bin", "python3")
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	if exec.CommandContext(ctx, bin, "-c", "import zmq").Run() == nil {
		return bin, nil
	}
	for _, step := range [][]string{
		{"python3", "-m", "venv", dir},
		{bin, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--retries", "1", "--timeout", "20", "pyzmq"},
	} {
		if out, err := exec.CommandContext(ctx, step[0], step[1:]...).CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w\n%s", step, err, out)
		}
	}
	return bin, nil
})

// engine is a process with a publisher on libzmq.
type engine struct {
	t                *testing.T
	endpoint, replay string
	in               io.Writer
	out              *bufio.Reader
}

func startEngine(t *testing.T, args ...string) *engine {
	t.Helper()
	if testing.Short() {
		t.Skip("it starts a process and may install packages")
	}
	bin, err := python()
	if err != nil {
		t.Skipf("there is no pyzmq to test against: %v", err)
	}
	noLeaks(t)
	has := func(name string) bool { return strings.Contains(strings.Join(args, " "), name) }
	if !has("--endpoint") {
		args = append(args, "--endpoint", "tcp://127.0.0.1:*")
	}
	if !has("--replay") {
		args = append(args, "--replay", "tcp://127.0.0.1:*")
	}
	cmd := exec.Command(bin, append([]string{filepath.Join("testdata", "publisher.py")}, args...)...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		ended := time.AfterFunc(5*time.Second, func() { _ = cmd.Process.Kill() })
		defer ended.Stop()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the publisher: %v", err)
		}
	})
	e := &engine{t: t, in: in, out: bufio.NewReader(out)}
	line, err := e.out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var version string
	if _, err := fmt.Sscan(line, &e.endpoint, &e.replay, &version); err != nil {
		t.Fatalf("the publisher said %q", line)
	}
	t.Logf("libzmq %s", version)
	return e
}

func (e *engine) do(format string, args ...any) {
	e.t.Helper()
	fmt.Fprintf(e.in, format+"\n", args...)
	if line, err := e.out.ReadString('\n'); err != nil || line != "done\n" {
		e.t.Fatalf("the publisher said %q, %v", line, err)
	}
}

// follow runs a stream of an engine until the test ends.
func (e *engine) follow(c Config) *rig {
	e.t.Helper()
	r := newRig(e.t, nil, c)
	e.t.Cleanup(func() { r.stop() })
	return r
}

func (r *rig) becomes(t *testing.T, first, last int, s State, complete bool) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("the sink holds %s; %+v", r.span(), r.s.Status())
		}
	}()
	until(t, fmt.Sprintf("batches %d to %d, %v, complete %v", first, last, s, complete), func() bool { return r.has(first, last, s, complete) })
}

func TestLibzmq(t *testing.T) {
	ipc := "ipc://" + filepath.Join(t.TempDir(), "pub")
	for name, args := range map[string][]string{
		"with topic":    {"--layout", "new", "--topic", "kv@10.0.0.1:8000@model", "--heartbeat", "100"},
		"without topic": {"--layout", "old"},
		"ipc":           {"--endpoint", ipc, "--replay", ipc + "-replay"},
	} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t, args...)
			e.do("publish 10 100")
			r := e.follow(Config{Endpoint: e.endpoint, Replay: e.replay, Slots: make(chan struct{}, 1)})
			r.becomes(t, 0, 9, Live, true)
			e.do("publish 5 300")
			r.becomes(t, 0, 14, Live, true)
			e.do("lose 3 100")
			e.do("publish 1 100")
			r.becomes(t, 0, 18, Live, true)
			time.Sleep(time.Second) // libzmq closes connections that do not answer its PINGs
			if st := r.s.Status(); st.Reconnects != 0 {
				t.Errorf("status %+v", st)
			}
			e.do("restart")
			e.do("publish 4 100")
			r.becomes(t, 0, 3, Live, true)
			if got := r.since[3].payload; !strings.HasPrefix(got, "life 1 batch 3.") {
				t.Errorf("the sink holds %.20q", got)
			}
			if st := r.s.Status(); st.Gaps != 1 || st.Reconnects == 0 || st.Err != "" {
				t.Errorf("status %+v", st)
			}
		})
	}
}
