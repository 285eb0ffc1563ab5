package tests

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestGivenBackBodiesAreLetGoOf has a backup that delays reading the body that the router
// handed back. The body counts as memory until then, or until the client leaves.
func TestGivenBackBodiesAreLetGoOf(t *testing.T) {
	goOn := make(chan struct{})
	got := make(chan int64, 1)
	backup := serveRaw(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-goOn:
			n, _ := io.Copy(io.Discard, r.Body)
			got <- n
		case <-r.Context().Done():
		}
	})
	s := startCaddy(t, "kv_router "+freeAddr(t)+"\nhandle_errors {\nreverse_proxy "+backup+"\n}")
	body := string(ask(strings.Repeat("word ", 16<<20/5)).body())
	counted := func(t *testing.T, least int64) {
		t.Helper()
		eventually(t, 10*time.Second, "the body is counted", func() bool { return s.bodyBytes(t) >= least })
	}
	gone := func(t *testing.T) {
		t.Helper()
		eventually(t, 10*time.Second, "the body is let go of", func() bool { return s.bodyBytes(t) == 0 })
	}
	t.Run("ClientLeaves", func(t *testing.T) {
		q := s.start(t, "/v1/chat/completions", body)
		counted(t, int64(len(body)))
		q.leave()
		gone(t)
	})
	t.Run("BackupReads", func(t *testing.T) {
		q := s.start(t, "/v1/chat/completions", body)
		counted(t, int64(len(body)))
		close(goOn)
		if n := <-got; n != int64(len(body)) {
			t.Errorf("the backup got %d of %d bytes", n, len(body))
		}
		if a := q.wait(t); a.status != http.StatusOK {
			t.Errorf("status %d", a.status)
		}
		gone(t)
	})
	t.Run("NobodyReads", func(t *testing.T) {
		if err := s.reload("kv_router " + freeAddr(t) + "\nhandle_errors {\nrespond ours\n}"); err != nil {
			t.Fatal(err)
		}
		if a := s.post(t.Context(), "/v1/chat/completions", []byte(body)); string(a.body) != "ours" {
			t.Errorf("status %d, error %v, body %q", a.status, a.err, a.body)
		}
		gone(t)
	})
}

// converse sends messages one by one, each after the answer to the one before.
func converse(t *testing.T, c *http.Client, url, kind string, messages []string) error {
	ctx, leave := context.WithTimeout(t.Context(), 10*time.Second)
	defer leave()
	in, out := io.Pipe()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, in)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", kind)
	go io.WriteString(out, messages[0]) // the header comes with the first answer
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for i, m := range messages {
		if i > 0 {
			if _, err := io.WriteString(out, m); err != nil {
				return err
			}
		}
		answer := make([]byte, len(m))
		if _, err := io.ReadFull(resp.Body, answer); err != nil || string(answer) != m {
			return fmt.Errorf("answer %d: %q, %w", i, answer, err)
		}
	}
	out.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}
