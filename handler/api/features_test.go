package api

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	kvevents "github.com/caddy-kvrouter/kvrouter/kvscore/events"
)

// TestFeaturesAreThoseOfEvents has a prompt with media, and the KV events of its blocks with the
// extra keys that vLLM's own functions made (testdata/features/events.py). The prompt is found, and
// with other media or other places it is not.
func TestFeaturesAreThoseOfEvents(t *testing.T) {
	body, err := os.ReadFile("testdata/features/request.json")
	if err != nil {
		t.Fatal(err)
	}
	told, err := os.ReadFile("testdata/features/events.txt")
	if err != nil {
		t.Fatal(err)
	}
	image, second := strings.Repeat("a", 64), strings.Repeat("b", 64)
	for line := range strings.Lines(string(told)) {
		name, payload, _ := strings.Cut(strings.TrimSpace(line), " ")
		batch, err := hex.DecodeString(payload)
		if err != nil {
			t.Fatal(err)
		}
		adapter, salt := map[string]string{"adapter": "ad", "tower": "ad"}[name], map[string]string{"salt": "s"}[name]
		for what, c := range map[string]struct {
			from, to string
			tokens   int64
		}{
			"the same":             {"", "", 28},
			"another name":         {image, second, 4},
			"another second name":  {second, image, 12},
			"an escaped name":      {image, `\u0061` + image[1:], 28},
			"at another place":     {`"offset": 6`, `"offset": 5`, 4},
			"shorter":              {`"length": 7`, `"length": 6`, 12},
			"shorter in the block": {`"length": 5`, `"length": 3`, 28},
			"shorter by the block": {`"length": 5`, `"length": 2`, 20},
			"another modality":     {"audio", "video", 28},
			"no media":             {`"features": {`, `"features":null,"more": {`, 4},
			"places before names":  {`"mm_hashes"`, `"mm_placeholders": {"image": [{"offset":6,"length":7},{"offset":15,"length":3}],"audio":[{"offset":18,"length":5}]},"mm_hashes"`, 28},
			"over the next":        {`"length": 7`, `"length": 10`, 0},
		} {
			got := found(t, batch, strings.ReplaceAll(string(body), c.from, c.to), adapter, salt, c.from == "")
			if c.from != "" && !strings.Contains(string(body), c.from) {
				t.Fatalf("%s: the request has no %s", what, c.from)
			}
			if got != c.tokens {
				t.Errorf("%s, %s: %d tokens are found, want %d", name, what, got, c.tokens)
			}
		}
	}
}

// found returns how many of a request's tokens a worker holds that has published a batch.
func found(t *testing.T, batch []byte, body, adapter, salt string, exact bool) int64 {
	t.Helper()
	o := Options{BlockSize: 16, Sizes: []int{4, 16}, Seed: testSeed}
	r, err := Parse(tokensIn{}, []byte(body), o)
	if err != nil {
		t.Fatal(err)
	}
	s := kvscore.NewScheduler(kvscore.Settings{})
	s.Declare(kvscore.Target{Worker: 1}, 0)
	w := kvevents.NewWorker(s, o.Seed, 1, 1, kvevents.Engine{BlockTokens: 4, Adapters: true, Salts: true})
	p := w.Recorder(0)
	p.State(kvevents.Live, true)
	p.Payload(0, batch)
	q := &kvscore.Request{Root: r.Root, Blocks: r.Blocks, BlockTokens: 16, Tokens: r.Tokens}
	for _, c := range r.Chains {
		q.Identities = append(q.Identities, kvscore.Identity{
			BlockTokens: c.BlockSize, Root: kvscore.IdentityRoot(o.Seed, c.BlockSize, adapter, salt), Blocks: c.Blocks,
			Adapter: adapter != "", Salted: salt != "",
		})
	}
	sel := kvscore.Selection{Rand: rand.New(rand.NewPCG(1, 1))}
	s.Explain(time.Now(), q, []kvscore.Target{{Worker: 1}}, -1, new(kvscore.LeastLoad), &sel)
	if c := &sel.Candidates[0]; exact && c.Knowledge != kvscore.Exact {
		t.Errorf("the knowledge is %s", c.Knowledge)
	}
	return sel.Candidates[0].OverlapTokens
}

// TestFeaturesThatCannotBeRead has features of which the router cannot tell what they are. The
// prompt has no identity then, and the engine judges.
func TestFeaturesThatCannotBeRead(t *testing.T) {
	names, places := make([]string, maxFeatures+1), make([]string, maxFeatures+1)
	for i := range names {
		names[i], places[i] = `"a"`, `{"offset":`+strconv.Itoa(i)+`,"length":1}`
	}
	many := func(n int) string {
		return `{"mm_hashes":{"image":[` + strings.Join(names[:n], ",") + `]},"mm_placeholders":{"image":[` + strings.Join(places[:n], ",") + `]}}`
	}
	modalities := func(n int) string {
		var names, places []string
		for i := range n {
			names = append(names, `"m`+strconv.Itoa(i)+`":["a"]`)
			places = append(places, `"m`+strconv.Itoa(i)+`":[{"offset":`+strconv.Itoa(i)+`,"length":1}]`)
		}
		return `{"mm_hashes":{` + strings.Join(names, ",") + `},"mm_placeholders":{` + strings.Join(places, ",") + `}}`
	}
	of := func(names, places string) string {
		return `{"mm_hashes":` + names + `,"mm_placeholders":` + places + `}`
	}
	ids := "[" + strings.Repeat("7,", 2000) + "7]"
	for what, c := range map[string]struct {
		ids, features string
		known         bool
	}{
		"as many as allowed":       {ids, many(maxFeatures), true},
		"too many":                 {ids, many(maxFeatures + 1), false},
		"as many kinds as allowed": {ids, modalities(maxModalities), true},
		"too many kinds":           {ids, modalities(maxModalities + 1), false},
		"null":                     {ids, `null`, true},
		"empty":                    {ids, `{}`, true},
		"no media":                 {ids, of(`{}`, `{}`), true},
		"no media of a kind":       {ids, of(`{"image":[]}`, `{"image":[]}`), true},
		"a text":                   {ids, `"x"`, false},
		"a list":                   {ids, `["x"]`, false},
		"others":                   {ids, `{"a":1}`, false},
		"no places":                {ids, `{"mm_hashes":{"image":["a"]}}`, false},
		"no names":                 {ids, `{"mm_placeholders":{"image":[{"offset":1,"length":2}]}}`, false},
		"null name":                {ids, of(`{"image":[null]}`, `{"image":[{"offset":1,"length":2}]}`), false},
		"number for a name":        {ids, of(`{"image":[5]}`, `{"image":[{"offset":1,"length":2}]}`), false},
		"names of no list":         {ids, of(`{"image":"a"}`, `{"image":[{"offset":1,"length":2}]}`), false},
		"other kinds":              {ids, of(`{"image":["a"]}`, `{"audio":[{"offset":1,"length":2}]}`), false},
		"further places":           {ids, of(`{"image":["a"]}`, `{"image":[{"offset":1,"length":2}],"audio":[]}`), false},
		"further names":            {ids, of(`{"image":["a"],"audio":[]}`, `{"image":[{"offset":1,"length":2}]}`), false},
		"too many kinds of places": {ids, strings.Replace(modalities(maxModalities+1), `"m0":["a"],`, "", 1), false},
		"name of no text":          {ids, of(`{"image":["\ud800"]}`, `{"image":[{"offset":1,"length":2}]}`), false},
		"name of no UTF-8":         {ids, of("{\"image\":[\"\xff\"]}", `{"image":[{"offset":1,"length":2}]}`), false},
		"name of a pair":           {ids, of(`{"image":["\ud83d\ude00"]}`, `{"image":[{"offset":1,"length":2}]}`), true},
		"kind of no text":          {ids, of(`{"\ud800":["a"]}`, `{"\ud801":[{"offset":1,"length":2}]}`), false},
		"fewer places":             {ids, of(`{"image":["a","b"]}`, `{"image":[{"offset":1,"length":2}]}`), false},
		"more places":              {ids, of(`{"image":["a"]}`, `{"image":[{"offset":1,"length":2},{"offset":3,"length":2}]}`), false},
		"null place":               {ids, of(`{"image":["a"]}`, `{"image":[null]}`), false},
		"no length":                {ids, of(`{"image":["a"]}`, `{"image":[{"offset":1}]}`), false},
		"length of nothing":        {ids, of(`{"image":["a"]}`, `{"image":[{"offset":1,"length":0}]}`), false},
		"negative place":           {ids, of(`{"image":["a"]}`, `{"image":[{"offset":-1,"length":2}]}`), false},
		"immense":                  {ids, of(`{"image":["a"]}`, `{"image":[{"offset":9223372036854775807,"length":9223372036854775807}]}`), false},
		"beyond the prompt":        {ids, of(`{"image":["a"]}`, `{"image":[{"offset":2000,"length":2}]}`), false},
		"to its end":               {ids, of(`{"image":["a"]}`, `{"image":[{"offset":2000,"length":1}]}`), true},
		"one over another":         {ids, of(`{"image":["a","b"]}`, `{"image":[{"offset":1,"length":2},{"offset":2,"length":2}]}`), false},
		"a batch":                  {"[" + ids + "]", many(1), false},
		"text for ids":             {`"hello"`, many(1), false},
		"no ids":                   {"[]", many(1), false},
	} {
		r := mustParse(t, tokensIn{}, `{"model":"m","token_ids":`+c.ids+`,"features":`+c.features+`}`)
		if known := r.Kind == Tokens; known != c.known || !known && (r.Kind != None || r.Blocks != nil || r.Chains != nil) {
			t.Errorf("%s: kind %d with %d blocks", what, r.Kind, len(r.Blocks))
		}
	}
	if r := mustParse(t, tokensIn{}, `{"token_ids":`+ids+`,"content_parts":[{"type":"image_url","image_url":{"url":"x"}}]}`); r.Kind != None {
		t.Error("media that the engine has yet to place count as known")
	}
}

// TestFeaturesThatAreThereTwice: the engine takes the last of two equal members, however their
// names are written.
func TestFeaturesThatAreThereTwice(t *testing.T) {
	const (
		names, places = `"mm_hashes":{"image":["a"]}`, `"mm_placeholders":{"image":[{"offset":1,"length":2}]}`
		ids           = `"token_ids":[1,2,3,4,5,6,7,8]`
		wrongNames    = `"mm_hashes":{"image":["b"]}`
		wrongPlaces   = `"mm_placeholders":{"image":[{"offset":5,"length":2}]}`
	)
	of := func(members string) string { return `"features":{` + members + `}` }
	want := mustParse(t, tokensIn{}, `{`+ids+`,`+of(names+`,`+places)+`}`)
	for what, body := range map[string]string{
		"names":                   ids + `,` + of(wrongNames+`,`+names+`,`+places),
		"names, behind the rest":  ids + `,` + of(wrongNames+`,`+places+`,"kwargs_data":null,`+names),
		"places":                  ids + `,` + of(wrongPlaces+`,`+names+`,`+places),
		"places, behind the rest": ids + `,` + of(names+`,`+wrongPlaces+`,"kwargs_data":null,`+places),
		"escaped names":           ids + `,` + of(wrongNames+`,`+places+`,`+strings.Replace(names, "hashes", `hashe\u0073`, 1)),
		"names after escaped":     ids + `,` + of(strings.Replace(wrongNames, "hashes", `hashe\u0073`, 1)+`,`+places+`,`+names),
		"escaped places":          ids + `,` + of(names+`,`+wrongPlaces+`,`+strings.Replace(places, "mm", `\u006D\u006d`, 1)),
		"a kind's names":          ids + `,` + of(`"mm_hashes":{"image":["b"],"image":["a"]},`+places),
		"a kind's escaped names":  ids + `,` + of(`"mm_hashes":{"image":["b"],"imag\u0065":["a"]},`+places),
		"a kind's names, no list": ids + `,` + of(`"mm_hashes":{"image":null,"image":["a"]},`+places),
		"a kind's places":         ids + `,` + of(names+`,"mm_placeholders":{"image":[{"offset":5,"length":2}],"image":[{"offset":1,"length":2}]}`),
		"a kind's escaped places": ids + `,` + of(names+`,"mm_placeholders":{"image":[{"offset":5,"length":2}],"\u0069mage":[{"offset":1,"length":2}]}`),
		"a kind ten times":        ids + `,` + of(`"mm_hashes":{`+strings.Repeat(`"image":["b"],`, 9)+`"image":["a"]},`+places),
		"an offset":               ids + `,` + of(names+`,"mm_placeholders":{"image":[{"offset":5,"length":2,"offset":1}]}`),
		"an escaped offset":       ids + `,` + of(names+`,"mm_placeholders":{"image":[{"offset":5,"length":2,"off\u0073et":1}]}`),
		"a length":                ids + `,` + of(names+`,"mm_placeholders":{"image":[{"length":null,"offset":1,"length":2}]}`),
		"features":                of(wrongNames+`,`+places) + `,` + ids + `,` + of(names+`,`+places),
		"features before ids":     of(wrongNames+`,`+places) + `,` + of(names+`,`+places) + `,` + ids,
		"escaped features":        of(wrongNames+`,`+places) + `,` + ids + `,` + strings.Replace(of(names+`,`+places), "feat", `\u0066eat`, 1),
		"features of null":        `"features":null,` + ids + `,` + of(names+`,`+places),
		"ids":                     `"token_ids":[9,9,9,9],` + of(names+`,`+places) + `,` + ids,
		"escaped ids":             `"token_ids":[9,9,9,9],` + of(names+`,`+places) + `,` + strings.Replace(ids, "ids", `\u0069ds`, 1),
		"batches of ids":          `"token_ids":[[1,2],[3]],` + of(names+`,`+places) + `,` + ids,
	} {
		if r := mustParse(t, tokensIn{}, `{`+body+`}`); r.Kind != Tokens || !slices.Equal(r.Blocks, want.Blocks) {
			t.Errorf("%s: kind %d with the blocks %x, want %x", what, r.Kind, r.Blocks, want.Blocks)
		}
	}
	for what, body := range map[string]string{
		"names of null last":       ids + `,` + of(names+`,`+places+`,"mm_hashes":null`),
		"no places last":           ids + `,` + of(names+`,`+places+`,"mm_placeholders":{}`),
		"a kind without list last": ids + `,` + of(`"mm_hashes":{"image":["a"],"image":null},`+places),
		"a length of 0 last":       ids + `,` + of(names+`,"mm_placeholders":{"image":[{"offset":1,"length":2,"length":0}]}`),
		"a place without a comma":  ids + `,` + of(names+`,"mm_placeholders":{"image":[{"offset":1,"length":2 "offset":5}]}`),
		"malformed behind them":    ids + `,` + of(names+`,`+places+` "mm_hashes":{}`),
		"no features last":         ids + `,` + of(names+`,`+places) + `,"features":[1]`,
		"no ids last":              ids + `,` + of(names+`,`+places) + `,"token_ids":null`,
	} {
		if r := mustParse(t, tokensIn{}, `{`+body+`}`); r.Kind != None || r.Blocks != nil || r.Chains != nil {
			t.Errorf("%s: kind %d with %d blocks", what, r.Kind, len(r.Blocks))
		}
	}
	if r := mustParse(t, tokensIn{}, `{`+ids+`,`+of(names+`,`+places)+`,"features":null}`); !slices.Equal(r.Blocks, tokenBlocks(4, 1, 2, 3, 4, 5, 6, 7, 8)) {
		t.Error("features count although the last ones are null")
	}
}

// TestFeaturesOfNothingElse: the ids alone are not the prompt, so nobody is given them, and other
// ids do not take their place.
func TestFeaturesOfNothingElse(t *testing.T) {
	body := []byte(`{"token_ids":[1,2,3,4,5],"features":{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":1,"length":2}]}}}`)
	r := mustParse(t, tokensIn{}, string(body))
	if ids := r.AppendTokens(nil, body); r.Kind != Tokens || ids != nil || r.Give([]byte("[1,2,3,4]"), testOptions) {
		t.Errorf("the prompt is of kind %d with the ids %s", r.Kind, ids)
	}
}

// TestFeaturesInThePromptsTail has media in the block that the answer fills up.
func TestFeaturesInThePromptsTail(t *testing.T) {
	body := func(ids string) string {
		return `{"token_ids":[` + ids + `],"features":{"mm_placeholders":{"image":[{"offset":2,"length":3}]},"mm_hashes":{"image":["a"]}}}`
	}
	n := observe(mustParse(t, tokensIn{}, body("1,2,7,7,7")), true)
	n.Write([]byte("data: {\"choices\":[{\"index\":0,\"token_ids\":[10,11,12,13,14]}]}\n\n"))
	n.Write([]byte("data: {\"choices\":[{\"index\":0,\"token_ids\":[15],\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n"))
	n.Finish()
	want := mustParse(t, tokensIn{}, body("1,2,7,7,7,10,11,12,13,14")).Blocks
	if got := n.Prediction(); len(want) != 2 || !slices.Equal(got, want) {
		t.Errorf("the next turn begins with %x, want %x", got, want)
	}
}

func TestFeaturesCostNoAllocationForEachBlock(t *testing.T) {
	allocs := func(blocks int) float64 {
		n := 4 * blocks
		body := []byte(`{"features":{"mm_hashes":{"image":["a","b"]},"mm_placeholders":{"image":[{"offset":1,"length":3},{"offset":5,"length":` +
			strconv.Itoa(n-5) + `}]}},"token_ids":[` + strings.Repeat("7,", n-1) + `7]}`)
		return testing.AllocsPerRun(20, func() { _, _ = Parse(tokensIn{}, body, testOptions) })
	}
	if few, many := allocs(10), allocs(1000); many > few {
		t.Errorf("%v allocations for 10 blocks, %v for 1000", few, many)
	}
}

// BenchmarkFeaturesOfManyPlaces has the longest lists that a client can send.
func BenchmarkFeaturesOfManyPlaces(b *testing.B) {
	empty := strings.Repeat("{},", 2<<20) + "{}"
	var names, places []string
	for i := range maxModalities {
		names = append(names, `"m`+strconv.Itoa(i)+`":[]`)
		places = append(places, `"m`+strconv.Itoa(i)+`":[]`)
	}
	body := []byte(`{"token_ids":[1,2,3,4],"features":{"mm_hashes":{` + strings.Join(names, ",") + `},"mm_placeholders":{"m0":[` + empty + `],` + strings.Join(places, ",") + `}}}`)
	for b.Loop() {
		_, _ = Parse(tokensIn{}, body, testOptions)
	}
}

func BenchmarkFeatures(b *testing.B) {
	ids := []byte(`{"model":"m","token_ids":[` + strings.Repeat("151655,", 7999) + `1]`)
	with := append(bytes.Clone(ids), `,"features":{"mm_hashes":{"image":["`+strings.Repeat("ab", 32)+`"]},"mm_placeholders":{"image":[{"offset":100,"length":7000}]},"kwargs_data":{"image":["`+
		strings.Repeat("A", 4<<20)+`"]}}`...)
	for name, body := range map[string][]byte{"without": append(ids, '}'), "with": append(with, '}')} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_, _ = Parse(tokensIn{}, body, Options{BlockSize: 16, Sizes: []int{16}, Seed: testSeed})
			}
		})
	}
}

// FuzzFeatures compares the blocks with those that are made the plain way, as vLLM's: each block
// has the names of the media that overlap it.
func FuzzFeatures(f *testing.F) {
	f.Add([]byte{30, 4, 6, 7, 2, 3, 0, 5}, true)
	f.Add([]byte{16, 1, 0, 16}, false)
	f.Add([]byte{200, 7, 0, 1, 0, 1, 0, 1, 100, 50}, true)
	f.Fuzz(func(t *testing.T, b []byte, first bool) {
		if len(b) < 2 {
			return
		}
		type place struct {
			Offset int `json:"offset"`
			Length int `json:"length"`
		}
		type item struct {
			name string
			place
		}
		ids, size := make([]uint32, int(b[0])+1), int(b[1])%20+1
		for i := range ids {
			ids[i] = uint32(i % 5)
		}
		names, places := map[string][]string{}, map[string][]place{}
		var items []item
		at, valid := 0, true
		for i := 2; i+1 < len(b) && len(items) < 20; i += 2 {
			it := item{strconv.Itoa(int(b[i])%3) + "\"ä\\", place{at + int(b[i]), int(b[i+1])}}
			at = it.Offset + it.Length
			valid = valid && it.Length > 0 && at <= len(ids)
			items = append(items, it)
		}
		for i, it := range slices.Backward(items) { // not in order
			m := []string{"image", "audio"}[i%2]
			names[m], places[m] = append(names[m], it.name), append(places[m], it.place)
		}
		var want []uint64
		for i, h := range tokenBlocks(size, ids...) {
			from := i * size
			for _, it := range items {
				if it.Offset < from+size && it.Offset+it.Length > from {
					h = kvscore.MediaBlock(testSeed, h, kvscore.MediaKey(testSeed, []byte(it.name)), int64(it.Offset-from))
				}
			}
			want = append(want, h)
		}
		list, _ := json.Marshal(ids)
		features, _ := json.Marshal(map[string]any{"mm_hashes": names, "mm_placeholders": places, "kwargs_data": nil})
		body := `{"token_ids":` + string(list) + `,"features":` + string(features) + `}`
		if first {
			body = `{"features":` + string(features) + `,"token_ids":` + string(list) + `}`
		}
		r, err := Parse(tokensIn{}, []byte(body), Options{BlockSize: 3, Sizes: []int{3, size}, Seed: testSeed})
		if err != nil {
			t.Fatal(err)
		}
		if !valid {
			if r.Kind != None || r.Chains != nil {
				t.Fatalf("%s is understood", body)
			}
			return
		}
		if got := r.Chains[1].Blocks; !slices.Equal(got, want) || size == 3 && !slices.Equal(r.Blocks, want) {
			t.Fatalf("%s: %x, want %x", body, got, want)
		}
	})
}
