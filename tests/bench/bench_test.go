package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go"
)

func itoa(n int) string { return strconv.Itoa(n) }

// TestMain lets the test binary be the program's own processes, as the program
// itself can, and those of the tests.
func TestMain(m *testing.M) {
	child, err := runChild(os.Args[1:])
	if !child {
		child, err = runTestChild(os.Args[1:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if !child {
		os.Exit(m.Run())
	}
}

func TestCommandLineIsChecked(t *testing.T) {
	for _, args := range [][]string{
		{"-contenders", "caddy,nobody"},
		{"-cells", "3k-c1"},
		{"-with", "x"},
		{"-with", "x=port=cmd"},
		{"-with", "x=99999=cmd"},
		{"-with", "caddy=0=cmd"},
		{"-with", "x=0=cmd", "-with", "x=0=cmd"},
		{"-with", "a/b=0=cmd"},
		{"-with", `a\b=0=cmd`},
		{"-with", "..=0=cmd"},
		{"-with", "a,b=0=cmd"},
		{"-contenders", "caddy,kv_router, caddy"},
		{"-cells", "1k-c1,1k-c1"},
		{"-rounds", "0"},
		{"rest"},
	} {
		if _, err := parse(args, io.Discard); err == nil {
			t.Errorf("%v is accepted", args)
		}
	}
	o, err := parse([]string{"-with", "x=1234=run --a=b", "-contenders", "x,caddy", "-cells", "16k-c1"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if x := o.contenders[0]; x.name != "x" || x.port != 1234 || x.command != "run --a=b" {
		t.Errorf("got %+v", x)
	}
	if len(o.contenders) != 2 || len(o.cells) != 1 || o.cells[0].size != 16<<10 {
		t.Errorf("got %v %v", contenderNames(o.contenders), o.cells)
	}
}

func TestPlaceholdersAreFilledIn(t *testing.T) {
	own := t.TempDir()
	template := filepath.Join(t.TempDir(), "x.conf")
	if err := os.WriteFile(template, []byte("listen {port}; server {upstream2};"), 0o600); err != nil {
		t.Fatal(err)
	}
	known := placeholders("127.0.0.1:80", "/caddy", own, []string{"a:1", "b:2"})
	got, err := expand("run {config:"+template+"} --port {port} {upstreams}", own, known)
	if want := "run " + filepath.Join(own, "x.conf") + " --port 80 http://a:1 http://b:2"; err != nil || got != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	if b, err := os.ReadFile(filepath.Join(own, "x.conf")); string(b) != "listen 80; server b:2;" {
		t.Errorf("got %q, %v", b, err)
	}
	if _, err := expand("{config:/nowhere/at/all}", own, known); err == nil {
		t.Error("a missing file is accepted")
	}
}

func TestIncompleteAnswersAreErrors(t *testing.T) {
	const sse, plain = "text/event-stream; charset=utf-8", "application/json"
	for _, c := range []struct {
		contentType, end string
		good             bool
	}{
		{sse, "data: {}\n\ndata: [DONE]\n\n", true},
		{sse, "data: {}\n\n", false},
		{sse, "data: {}\n\ndata: [DO", false},
		{plain, `{"choices":[],"usage":{"prompt_tokens":1}}`, true},
		{plain, `{"choices":[],"usage":{"prompt_tokens":1}`[:30], false},
		{plain, `{"error":{}}`, false},
		{plain, ``, false},
	} {
		if err := whole(c.contentType, []byte(c.end)); (err == nil) != c.good {
			t.Errorf("%q: %v", c.end, err)
		}
	}
}

// The answers are what OpenAI's own client takes them for.
func TestMockAnswersAreOpenAI(t *testing.T) {
	usage := usageOf(400)
	var chat openai.ChatCompletion
	mustRead(t, string(chatAnswers.plain)+usage+"}", &chat)
	if chat.Choices[0].Message.Content == "" || chat.Choices[0].FinishReason != "stop" || chat.Usage.PromptTokens != 101 {
		t.Errorf("got %+v", chat)
	}
	var text openai.Completion
	mustRead(t, string(completionAnswers.plain)+usage+"}", &text)
	if text.Choices[0].Text == "" || text.Usage.TotalTokens != 201 {
		t.Errorf("got %+v", text)
	}
	if n := len(chatAnswers.plain) + len(usage); n < 400 || n > 600 {
		t.Errorf("%d bytes", n)
	}
	for _, c := range []struct {
		answers *answers
		object  string
		events  int
	}{{&chatAnswers, "chat.completion.chunk", chunks + 2}, {&completionAnswers, "text_completion", chunks + 1}} {
		if len(c.answers.events) != c.events {
			t.Errorf("%s: %d events", c.object, len(c.answers.events))
		}
		for _, e := range append(c.answers.events, []byte(c.answers.usage+usage+"}\n\n")) {
			data, ok := bytes.CutPrefix(e, []byte("data: "))
			if !ok || !bytes.HasSuffix(e, []byte("\n\n")) {
				t.Fatalf("%q is no event", e)
			}
			var chunk openai.ChatCompletionChunk
			mustRead(t, string(data), &chunk)
			if string(chunk.Object) != c.object {
				t.Errorf("object %q", chunk.Object)
			}
		}
	}
}

func mustRead(t *testing.T, s string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), into); err != nil {
		t.Fatalf("%s: %v", s, err)
	}
}

// The whole program, briefly: all built-in contenders and one of -with.
func TestBenchRuns(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a Caddy")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	out := filepath.Join(t.TempDir(), "samples.json")
	var tables, progress bytes.Buffer
	err := run(ctx, []string{
		"-rounds", "1", "-time", "100ms", "-warmup", "50ms", "-cells", "1k-c1,16k-s100-c32", "-md", "-json", out,
		"-with", "second=0=exec {caddy} reverse-proxy --from http://127.0.0.1:{port} --to {upstream1} --to {upstream2}",
	}, &tables, &progress)
	if err != nil {
		t.Fatalf("%v\n%s", err, progress.String())
	}
	for _, want := range []string{
		"| direct | caddy | kv_router | kv_router-session | kv_router-header | kv_router-tokens | second |",
		"### CPU time per request", "| 1k-c1 |", "| 16k-s100-c32 |", "No contender had errors.",
	} {
		if !strings.Contains(tables.String(), want) {
			t.Errorf("no %q in\n%s", want, tables.String())
		}
	}
	var samples struct{ Samples []map[string]any }
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	mustRead(t, string(data), &samples)
	if len(samples.Samples) != 14 {
		t.Errorf("%d samples", len(samples.Samples))
	}
	for _, s := range samples.Samples {
		if s["requests"].(float64) == 0 || s["errors"].(float64) != 0 || s["p50_ms"] == nil {
			t.Errorf("got %v", s)
		}
		if _, _, noClock := cpuTime(os.Getpid(), nil); noClock == nil && s["contender"] != "direct" && s["cpu_ms"] == nil {
			t.Errorf("no CPU time: %v", s)
		}
	}
}
