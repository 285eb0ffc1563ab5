package tests

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"reflect"
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

// TestTooLongBodies has bodies above the server's max_size, both read into memory and
// streamed. The status equals that of reverse_proxy, with and without error routes. No
// text is one of Go's.
func TestTooLongBodies(t *testing.T) {
	seen := &arrivals{list: make(map[string][]arrival)}
	primary, backup := seen.upstream(t, "primary", nil), seen.upstream(t, "backup", nil)
	limited := func(size string) []pair {
		return []pair{before("request_body {\nmax_size "+size+"\n}", proxies("limited", primary))}
	}
	for _, v := range []struct {
		name, size string
		sent       int
	}{
		{"Read", "3KB", 5000},
		{"Streamed", "100KB", 200_000},
	} {
		for _, routes := range []string{"none", "respond", "backup"} {
			site := places(limited(v.size), backup)
			if routes != "backup" {
				site = site[:strings.Index(site, "handle_errors")]
			}
			if routes == "respond" {
				site += "handle_errors {\nrespond \"{err.status_code} {err.message}\"\n}\n"
			}
			s, fronts := startFronts(t, site)
			for _, f := range fronts {
				for _, d := range destinations {
					for _, chunked := range []bool{false, true} {
						var got [2]result
						for i, directive := range directives {
							id := fmt.Sprint(v.name, f.name, d.name, chunked, routes, directive)
							got[i] = f.send(t, seen, id, f.url+"/"+directive+"/limited"+d.path, d, framing{size: v.sent, chunked: chunked}, "X-Backup", "reverse_proxy")
							if strings.Contains(got[i].Body, "http:") && i == 1 && chunked && d.inference {
								t.Errorf("%s: %s", id, got[i].Body)
							}
							got[i].Body = ""
						}
						if !reflect.DeepEqual(got[0], got[1]) || got[0].Status != http.StatusRequestEntityTooLarge {
							t.Errorf("%s, %s, %s, chunked %v, %s: got %+v, want %+v", v.name, f.name, d.name, chunked, routes, got[1], got[0])
						}
					}
				}
			}
			s.booksAtZero(t)
		}
	}
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

// TestConversations has an upstream that answers each message of a body as it comes. Its
// path belongs to no known API, and its type is not JSON.
func TestConversations(t *testing.T) {
	var both http.Protocols
	both.SetHTTP1(true)
	both.SetUnencryptedHTTP2(true)
	engine := serveProtocols(t, &both, func(w http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(w)
		for part := make([]byte, 100); ; {
			n, err := r.Body.Read(part)
			w.Write(part[:n])
			c.Flush()
			if err != nil {
				return
			}
		}
	})
	s, fronts := startFronts(t, places([]pair{proxies("h2c", engine, "transport http {\nversions h2c\n}")}, freeAddr(t)))
	for _, f := range fronts[1:] {
		for _, path := range []string{"/invocations", "/v1/audio/transcriptions"} {
			for kind, messages := range map[string][]string{
				"text/plain":       {"one", "two", "three"},
				"application/grpc": {"\x00\x00\x00\x00\x03one", "\x00\x00\x00\x00\x03two"},
			} {
				for _, directive := range directives {
					if err := converse(t, f.client, f.url+"/"+directive+"/h2c"+path, kind, messages); err != nil {
						t.Errorf("%s, %s, %s, %s: %v", f.name, directive, path, kind, err)
					}
				}
			}
		}
	}
	s.booksAtZero(t)
}
