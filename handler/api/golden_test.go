package api

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// goldenFile is nil if there is none.
func goldenFile(t testing.TB, dir, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", dir, name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return b
}

// Each API's request, its answers, streamed and plain, and the turn that follows. They have
// the form of vLLM 0.32, SGLang 0.5.21 and llama.cpp b1-1652066.
func TestGolden(t *testing.T) {
	for _, c := range []struct {
		path                       string
		work                       Work
		kind                       Kind
		chunks                     int // of the stream
		prompt, completion, cached int64
		predicts                   bool
	}{
		{"/v1/chat/completions", Generate, Text, 5, 212, 28, 192, true},
		{"/v1/completions", Generate, Text, 2, 11, 7, -1, true},
		{"/completion", Generate, Text, 6, 21, 6, 0, true},
		{"/v1/responses", Generate, Text, 5, 212, 28, 192, true},
		{"/v1/messages", Generate, Text, 5, 212, 28, 192, true},
		{"/v1/messages/count_tokens", Count, None, 0, -1, -1, -1, false},
		{"/generate", Generate, Text, 3, 11, 7, 8, true},
		{"/inference/v1/generate", Generate, Tokens, 2, 40, 3, 32, true},
		{"/v1/embeddings", Prefill, Text, 0, 14, 0, -1, false},
		{"/classify", Prefill, Text, 0, 14, 0, -1, false},
		{"/pooling", Prefill, Text, 0, 14, 0, -1, false},
		{"/v2/rerank", Prefill, Text, 0, 14, -1, -1, false},
		{"/v1/score", Prefill, Text, 0, 14, 0, -1, false},
	} {
		a := For(c.path)
		t.Run(a.Name(), func(t *testing.T) {
			r := mustParse(t, a, string(goldenFile(t, a.Name(), "request.json")))
			if a.Work() != c.work || r.Kind != c.kind || (r.Kind != None) != (len(r.Blocks) > 0) || r.Stream != (c.chunks > 0) {
				t.Errorf("work %d, kind %d, %d blocks, stream %v", a.Work(), r.Kind, len(r.Blocks), r.Stream)
			}
			next := goldenFile(t, a.Name(), "next.json")
			for _, name := range []string{"answer.json", "stream.txt"} {
				body := goldenFile(t, a.Name(), name)
				if body == nil {
					continue
				}
				stream := name == "stream.txt"
				n := observe(r, stream)
				n.Write(body)
				n.Finish()
				prompt, completion, cached := n.Usage()
				if !n.Done() || n.Failed() || prompt != c.prompt || completion != c.completion || cached != c.cached {
					t.Errorf("%s: done %v, failed %v, usage %d %d %d", name, n.Done(), n.Failed(), prompt, completion, cached)
				}
				if c.work != Count && !n.FirstToken() || stream && n.Chunks() != c.chunks {
					t.Errorf("%s: first token %v, %d chunks", name, n.FirstToken(), n.Chunks())
				}
				p := n.Prediction()
				if (p != nil) != c.predicts {
					t.Errorf("%s: prediction %x", name, p)
				}
				if !c.predicts {
					continue
				}
				if then := mustParse(t, a, string(next)); len(p) < len(r.Blocks) || r.Kind == Text && len(p) == len(r.Blocks) || len(p) > len(then.Blocks) || !slices.Equal(p, then.Blocks[:len(p)]) {
					t.Errorf("%s: the next turn does not begin with the %d blocks that were predicted", name, len(p))
				}
			}
		})
	}
	// one conversation, one chain, also in the engines' own words
	turns := map[string]API{}
	for _, a := range []API{chat{}, responses{}, messages{}} {
		turns[string(goldenFile(t, a.Name(), "next.json"))] = a
	}
	same(t, turns)
}
