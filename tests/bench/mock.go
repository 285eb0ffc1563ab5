package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/process"
)

const (
	// mockCommand is the argument with which this program is the upstreams.
	mockCommand = "serve-mock-upstreams"
	// mocks is the number of upstreams.
	mocks = 4
)

func isMock(args []string) bool { return len(args) == 1 && args[0] == mockCommand }

// startUpstreams starts the mock upstreams in a process of their own and returns their
// addresses. The process ends when its input does.
func startUpstreams() (addrs []string, stop func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.Command(self, mockCommand) //nolint:gosec // it is this program
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	proc, err := process.Start(cmd, "")
	if err != nil {
		return nil, nil, err
	}
	stop = func() {
		in.Close()
		proc.Stop()
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		stop()
		return nil, nil, err
	}
	return strings.Fields(line), stop, nil
}

// mock answers as an engine does, at once.
type mock struct{ buffers sync.Pool }

func newMock() *mock {
	return &mock{buffers: sync.Pool{New: func() any { return new(bytes.Buffer) }}}
}

// serveMock serves the upstreams until in ends. It writes their addresses to out.
func serveMock(in io.Reader, out io.Writer) error {
	debug.SetGCPercent(400)
	m := newMock()
	addrs := make([]string, 0, mocks)
	for range mocks {
		ln, err := canned.Listen()
		if err != nil {
			return err
		}
		addrs = append(addrs, ln.Addr().String())
		srv := &http.Server{Handler: m, ReadHeaderTimeout: time.Minute}
		defer srv.Close()
		go srv.Serve(ln) //nolint:errcheck // it ends with Close
	}
	fmt.Fprintln(out, strings.Join(addrs, " "))
	_, err := io.Copy(io.Discard, in)
	return err
}

// ServeHTTP implements http.Handler.
func (m *mock) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := m.buffers.Get().(*bytes.Buffer)
	defer m.buffers.Put(body)
	body.Reset()
	if n := int(r.ContentLength); n > 0 && n < 256<<20 {
		body.Grow(n + bytes.MinRead) // so that seeing EOF does not make it grow
	}
	if _, err := body.ReadFrom(r.Body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var a *answers
	switch {
	case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/chat/completions"):
		a = &chatAnswers
	case r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/completions"):
		a = &completionAnswers
	case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/models"):
		w.Header()["Content-Type"] = jsonType
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"`+modelName+`","object":"model","created":0,"owned_by":"bench"}]}`)
		return
	case r.Method == http.MethodGet && strings.Contains(r.URL.Path, "health"):
		return
	default:
		http.NotFound(w, r)
		return
	}
	usage := usageOf(body.Len())
	if asksForStream(body.Bytes()) {
		a.stream(w, usage)
		return
	}
	w.Header()["Content-Type"] = jsonType
	_, _ = w.Write(append(append(make([]byte, 0, 1024), a.plain...), usage+"}"...))
}

// asksForStream tells whether a body has "stream": true, wherever a router may
// have put it.
func asksForStream(body []byte) bool {
	_, rest, found := bytes.Cut(body, []byte(`"stream"`))
	if !found {
		return false
	}
	rest = bytes.TrimLeft(rest[:min(len(rest), 16)], " \t\r\n:")
	return bytes.HasPrefix(rest, []byte("true"))
}

// usageOf makes the usage of a body of the given size in bytes.
func usageOf(size int) string {
	prompt := strconv.Itoa(size/4 + 1)
	return `"usage":{"prompt_tokens":` + prompt + `,"completion_tokens":100,"total_tokens":` + strconv.Itoa(size/4+101) +
		`,"prompt_tokens_details":{"cached_tokens":0}}`
}

var (
	jsonType   = []string{"application/json"}
	streamType = []string{"text/event-stream; charset=utf-8"}
)

// answers are those of one API, as far as they do not depend on the request.
type answers struct {
	plain  []byte   // up to the usage
	events [][]byte // up to the usage's
	usage  string   // up to the usage, of its event
}

var chatAnswers, completionAnswers = newAnswers(canned.Chat), newAnswers(canned.Completions)

// newAnswers makes the answers of an API.
func newAnswers(api canned.API) (a answers) {
	p := &canned.Answer{ID: "cmpl-5f3a9c0d7e", Model: modelName, Begun: 1763700000, Reason: "stop", Usage: true}
	for i := range chunks {
		p.Pieces = append(p.Pieces, " word"+strconv.Itoa(i))
	}
	upToUsage := func(text []byte) []byte { return text[:bytes.LastIndex(text, []byte(`"usage":`))] }
	events := api.Events(p)
	for _, e := range events[:len(events)-1] {
		a.events = append(a.events, e.Append(nil))
	}
	a.usage = string(upToUsage(events[len(events)-1].Append(nil)))
	p.Pieces = []string{"This is the answer to the question, which is as long as a short answer usually is and says nothing."}
	a.plain, _ = json.Marshal(api.Whole(p))
	a.plain = upToUsage(a.plain)
	return a
}

// stream writes each event and flushes it, as engines do.
func (a *answers) stream(w http.ResponseWriter, usage string) {
	w.Header()["Content-Type"] = streamType
	flusher := w.(http.Flusher)
	send := func(event []byte) bool {
		_, err := w.Write(event)
		flusher.Flush()
		return err == nil
	}
	for _, e := range a.events {
		if !send(e) {
			return
		}
	}
	if send([]byte(a.usage + usage + "}\n\n")) {
		send([]byte("data: [DONE]\n\n"))
	}
}
