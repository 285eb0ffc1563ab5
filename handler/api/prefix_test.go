package api

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// TestPrefixes has two routers, which have no key in common, find the same beginnings of a text.
func TestPrefixes(t *testing.T) {
	prefixes := func(body string, o Options) []cache.Prefix {
		t.Helper()
		r, err := Parse(chat{}, []byte(body), o)
		if err != nil {
			t.Fatal(err)
		}
		return r.Prefixes
	}
	one, other := Options{TextBlock: 64, Seed: 1, Sizes: []int{16}}, Options{TextBlock: 64, Seed: 2, Sizes: []int{16}}
	bodyOf := func(messages int) string {
		var text strings.Builder
		for i := range messages {
			fmt.Fprintf(&text, `,{"role":"user","content":"%s"}`, strings.Repeat(fmt.Sprint(i, ` lines\n\"of\" text `), 40))
		}
		return `{"model":"llama-70b","messages":[` + text.String()[1:] + `]}`
	}
	body := bodyOf(16)
	want := prefixes(body, one)
	if n := len(want); n < 10 || want[0].Blocks != 16 || want[n-1].Blocks*5/4*64 < len(body)*8/10 {
		t.Fatalf("%d prefixes: %v", n, want)
	}
	if got := prefixes(body, other); !slices.Equal(got, want) {
		t.Errorf("another router has %v, want %v", got, want)
	}
	longer := prefixes(bodyOf(32), other)
	if !slices.Equal(longer[:len(want)], want) {
		t.Errorf("a later turn begins with %v, want %v", longer[:len(want)], want)
	}
	for name, body := range map[string]string{
		"another model": `{"model":"other",` + body[1+len(`"model":"llama-70b",`):], "another template": `{"reasoning_effort":"low",` + body[1:],
	} {
		if got := prefixes(body, one); len(got) != len(want) || got[0].Sum == want[0].Sum {
			t.Errorf("%s: %v", name, got)
		}
	}
	if got := prefixes(body, Options{TextBlock: 64, Seed: 1}); got != nil {
		t.Errorf("without KV events there are %d prefixes", len(got))
	}
}

// TestPrefixesCostOneAllocation reads a text with and without prefixes.
func TestPrefixesCostOneAllocation(t *testing.T) {
	body := []byte(`{"model":"llama-70b","messages":[{"role":"user","content":"` + strings.Repeat("text ", 5000) + `"}]}`)
	allocs := func(sizes []int) float64 {
		least := math.Inf(1) // under the race detector, a sync.Pool loses things by chance
		for range 100 {
			least = min(least, testing.AllocsPerRun(1, func() {
				r, err := Parse(chat{}, body, Options{TextBlock: 64, Seed: 1, Sizes: sizes})
				if err != nil {
					t.Fatal(err)
				}
				r.Done()
			}))
		}
		return least
	}
	if without, with := allocs(nil), allocs([]int{16}); with > without+1 {
		t.Errorf("%v allocations, and %v without prefixes", with, without)
	}
}
