package api

import (
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

func tokenBlocks(size int, ids ...uint32) []uint64 {
	key := cache.NewTokenHash(testSeed)
	return key.AppendBlocks(nil, ids, size)
}

func TestCompletionsPrompts(t *testing.T) {
	text := "a text that is longer than two blocks\n"
	for _, c := range []struct {
		prompt      string
		kind        Kind
		blocks      []uint64
		bytes       int64
		tokens      int64
		predictable bool
	}{
		{`"a text that is longer than two blocks\n"`, Text, blocksOf(spelled(text)), 39, 0, true},
		{`[ "a text that is longer than two blocks\u000a" ]`, Text, blocksOf(spelled(text)), 39, 0, true},
		{`["a text that is longer than two blocks\n","\u00e9"]`, Text, blocksOf(spelled(text)), 41, 0, false},
		{`[1,2,3,4294967295,5]`, Tokens, tokenBlocks(4, 1, 2, 3, 4294967295), 0, 5, false},
		{`[[1, 2 ,3,4]]`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 4, false},
		{`[[1,2,3,4],[9,8]]`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 6, false},
		{`[1,2,3,4294967296,5]`, None, nil, 0, 0, false},
		{`[1,2,3,-4]`, None, nil, 0, 0, false},
		{`[1,2,3,4.0]`, None, nil, 0, 0, false},
		{`[1,2,3,"4"]`, None, nil, 0, 0, false},
		{`["a",4]`, None, nil, 0, 0, false},
		{`[[1,2,3,4],5]`, None, nil, 0, 0, false},
		{`[[1,2,3,4],[]]`, None, nil, 0, 0, false},
		{`[]`, None, nil, 0, 0, false},
		{`{}`, None, nil, 0, 0, false},
		{`7`, None, nil, 0, 0, false},
	} {
		r := mustParse(t, completions{}, `{"prompt":`+c.prompt+`}`)
		if r.Kind != c.kind || !slices.Equal(r.Blocks, c.blocks) || r.Bytes != c.bytes || r.Tokens != c.tokens || r.predictable != c.predictable {
			t.Errorf("%s: %+v", c.prompt, r)
		}
	}
}

// TestTokenBlocksAreKeyed reads token ids with two seeds. Only the process knows
// its seed, so that a client cannot choose ids whose blocks collide.
func TestTokenBlocksAreKeyed(t *testing.T) {
	chain := func(seed uint64, give bool) []uint64 {
		t.Helper()
		o := Options{BlockSize: 4, Seed: seed}
		const ids = `[1,2,3,4,5,6,7,8]`
		body := `{"prompt":` + ids + `}`
		if give {
			body = `{"prompt":"x"}`
		}
		r, err := Parse(completions{}, []byte(body), o)
		if err != nil || give && !r.Give([]byte(ids), o) || len(r.Blocks) != 2 {
			t.Fatal(r, err)
		}
		return r.Blocks
	}
	for _, give := range []bool{false, true} {
		if !slices.Equal(chain(1, give), chain(1, false)) {
			t.Errorf("given %v: one seed gives two chains", give)
		}
		for i, block := range chain(2, give) {
			if block == chain(1, give)[i] {
				t.Errorf("given %v: block %d is the same with two seeds", give, i)
			}
		}
	}
}
