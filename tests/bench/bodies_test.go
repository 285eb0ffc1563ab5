package main

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf8"
)

// body returns a whole body, made in the plainest way.
func (c *conversation) body(number int64) []byte {
	return bytes.Join([][]byte{c.head, c.tail}, []byte(strconv.FormatInt(number, 10)))
}

func TestBodiesAreWhatTheyShouldBe(t *testing.T) {
	for _, c := range allCells() {
		for name, kind := range map[string]traffic{"chats": chats, "sessions": sessions, "tokens": tokens} {
			t.Run(c.name+"/"+name, func(t *testing.T) {
				c := c
				c.conversations = 3
				k := newCorpus(kind, c)
				if len(k.convs) != c.conversations {
					t.Fatalf("%d conversations", len(k.convs))
				}
				seen := make(map[string]bool)
				for i := range k.convs {
					b := k.convs[i].body(firstNumber + int64(i))
					if off := math.Abs(float64(len(b)-c.size)) / float64(c.size); off > 0.01 {
						t.Errorf("%d bytes, want %d", len(b), c.size)
					}
					if len(b) != k.convs[i].size() {
						t.Errorf("%d bytes, said to be %d", len(b), k.convs[i].size())
					}
					checkBody(t, k, i, c, kind, b)
					seen[string(b[c.size/3:])] = true
				}
				if len(seen) != c.conversations {
					t.Errorf("%d different ones of %d", len(seen), c.conversations)
				}
				if a, b := k.convs[0].head, k.convs[1].head; !bytes.Equal(a[:c.size/4], b[:c.size/4]) {
					t.Error("the first quarter differs")
				}
				if !bytes.Equal(newCorpus(kind, c).convs[1].head, k.convs[1].head) {
					t.Error("another round has other conversations")
				}
			})
		}
	}
}

func checkBody(t *testing.T, k *corpus, i int, c cell, kind traffic, b []byte) {
	t.Helper()
	if !utf8.Valid(b) {
		t.Error("not UTF-8")
	}
	var body struct {
		Model    string
		Stream   bool
		Messages []struct{ Role, Content string }
		Prompt   []uint32
		Nvext    struct {
			Session struct {
				ID string `json:"session_id"`
			} `json:"session_control"`
		}
	}
	if err := json.Unmarshal(b, &body); err != nil {
		t.Fatal(err)
	}
	if body.Model != modelName || body.Stream != c.stream || asksForStream(b) != c.stream {
		t.Errorf("model %q, stream %t, seen by the upstream as %t", body.Model, body.Stream, asksForStream(b))
	}
	number := strconv.Itoa(firstNumber + i)
	if kind == tokens {
		if n := len(body.Prompt); n < c.size/10 || strconv.Itoa(int(body.Prompt[n-1])) != number {
			t.Errorf("%d tokens", n)
		}
		return
	}
	if n := len(body.Messages); n < 2 || n%2 != 0 || body.Messages[0].Role != "system" || body.Messages[n-1].Role != "user" ||
		!strings.HasSuffix(body.Messages[n-1].Content, " "+number) {
		t.Errorf("%d messages, the last is %q", n, body.Messages[n-1])
	}
	want := ""
	if kind == sessions {
		want = k.key(i)
	}
	if body.Nvext.Session.ID != want {
		t.Errorf("session %q, want %q", body.Nvext.Session.ID, want)
	}
}

func TestSpliceReadsTheBody(t *testing.T) {
	k := newCorpus(chats, cell{name: "x", size: 5000, conversations: 1})
	want := k.convs[0].body(123456789)
	for name, r := range map[string]io.Reader{
		"whole":   newSplice(&k.convs[0], 123456789),
		"bytes":   iotest.OneByteReader(newSplice(&k.convs[0], 123456789)),
		"chunked": iotest.HalfReader(newSplice(&k.convs[0], 123456789)),
	} {
		got, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, want %d; %v", name, len(got), len(want), err)
		}
	}
}
