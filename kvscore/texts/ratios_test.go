package texts

import (
	"math"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// textBlocks cuts a text into blocks of 64 bytes.
func textBlocks(text string) (blocks []uint64) {
	for ; len(text) >= 64; text = text[64:] {
		blocks = append(blocks, Block(0, Kind([]byte(text[:64]))))
	}
	return blocks
}

func repeated(text string, n int) string { return strings.Repeat(text, n/len(text)+1)[:n] }

var (
	proseText    = repeated("The quick brown foxes jump over lazy dogs while others keep sleeping in the sun. ", 8192)
	jsonText     = repeated(`{"id":4711,"a":[1,2,{"x":-0.25}],"ok":true,"k":"v"},`, 8192)
	cyrillicText = repeated("Съешь же ещё этих мягких французских булок, да выпей чаю. ", 8192)
)

// bytesPerToken is what r assumes of a text.
func bytesPerToken(r *Ratios, model, text string) float64 {
	blocks := textBlocks(text)
	w := r.Weights(model, 64)
	return float64(64*1000*len(blocks)) / float64(w.Sum(blocks))
}

func learnText(r *Ratios, model, text string, perToken float64) {
	r.Learn(model, textBlocks(text), 0, 64, float64(len(text)/64*64)/perToken)
}

func near(a, b, share float64) bool { return math.Abs(a-b) <= share*b }

func TestRatiosLearn(t *testing.T) {
	var r Ratios
	before := bytesPerToken(&r, "m", proseText)
	if !near(before, BytesPerToken, 0.3) {
		t.Errorf("unknown model: %v", before)
	}
	blocks := textBlocks(proseText)
	r.Learn("m", blocks[:1], 0, 64, 31) // too short
	r.Learn("m", blocks, 0, 64, 40)     // no tokenizer does that
	r.Learn("m", blocks[:1], 0, 64, 200)
	r.Learn("m", nil, 0.5, 64, 1000)
	r.Learn("m", blocks, 0, 64, math.NaN())
	if got := bytesPerToken(&r, "m", proseText); got != before || len(r.models) > 0 {
		t.Errorf("learned from nonsense: %v", got)
	}
	for range 50 {
		learnText(&r, "m", proseText, 3)
	}
	if got := bytesPerToken(&r, "m", proseText); !near(got, 3, 0.01) {
		t.Errorf("ratio %v, want 3", got)
	}
	if got := bytesPerToken(&r, "new", proseText); !near(got, 3, 0.01) {
		t.Errorf("an unknown model has %v, want 3 as all others", got)
	}
}

// One model's text is of several kinds, whose tokens are of different length.
func TestRatiosTellKindsOfTextApart(t *testing.T) {
	var r Ratios
	for range 40 {
		learnText(&r, "m", proseText, 4.55)
		learnText(&r, "m", jsonText, 2.4)
		learnText(&r, "m", cyrillicText, 5.5)
		learnText(&r, "m", proseText[:4096]+jsonText[:4096], 2*4.55*2.4/(4.55+2.4))
	}
	for text, want := range map[string]float64{proseText: 4.55, jsonText: 2.4, cyrillicText: 5.5} {
		if got := bytesPerToken(&r, "m", text); !near(got, want, 0.05) {
			t.Errorf("%.20q: %v bytes a token, want %v", text, got, want)
		}
	}
}

func TestKindsOfShortBlocks(t *testing.T) {
	for n := range 200 {
		text := []byte(strings.Repeat("é[a", 100))[:n]
		if n < 16 != (Kind(text) == 0) {
			t.Errorf("%d bytes: kind %d", n, Kind(text))
		}
	}
	if a, b := Block(math.MaxUint64, Kind([]byte(proseText))), Block(math.MaxUint64, Kind([]byte(jsonText))); a == b || a>>5 != math.MaxUint64>>5 {
		t.Errorf("%x %x", a, b)
	}
}

// Names come from clients: there is a bound, and a name takes no memory of its own.
func TestRatiosAreBounded(t *testing.T) {
	var r Ratios
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	long := strings.Repeat("x", 1<<20)
	for i := range 3 * maxRatios {
		if i < 100 {
			learnText(&r, long+strconv.Itoa(i), proseText, 4)
		}
		learnText(&r, strconv.Itoa(i), proseText, 4)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 4<<20 || len(r.models) != maxRatios {
		t.Errorf("%d bytes are kept, %d models", grown, len(r.models))
	}
	learnText(&r, "a late comer", proseText, 2)
	if got := bytesPerToken(&r, "a late comer", proseText); !near(got, 2, 0.01) {
		t.Errorf("a full table learns nothing: %v", got)
	}
	if n := testing.AllocsPerRun(100, func() { r.Weights("a late comer", 64) }); n != 0 {
		t.Errorf("Weights allocates %v times", n)
	}
	runtime.KeepAlive(&r)
}

// TestInventedModelsKeepTheServedOnes has one client invent names of models between the texts of two that
// others use.
func TestInventedModelsKeepTheServedOnes(t *testing.T) {
	var r Ratios
	for i := range 4 * maxRatios {
		if i%(maxRatios/2) == 0 {
			learnText(&r, "a", proseText, 2)
			learnText(&r, "b", proseText, 8)
		}
		learnText(&r, "invented"+strconv.Itoa(i), proseText, 4)
	}
	if a, b := bytesPerToken(&r, "a", proseText), bytesPerToken(&r, "b", proseText); !near(a, 2, 0.01) || !near(b, 8, 0.01) {
		t.Errorf("%v and %v bytes a token, want 2 and 8", a, b)
	}
}

// A new model begins as the others are, and goes all the way to its own first text.
func TestFirstTextOfAModelCountsWhole(t *testing.T) {
	var r Ratios
	for range 20 {
		learnText(&r, "a", proseText, 4)
	}
	learnText(&r, "b", proseText, 2)
	if got := bytesPerToken(&r, "b", jsonText); got > bytesPerToken(&r, "a", jsonText)*0.7 {
		t.Errorf("%v bytes a token of another kind", got)
	}
	if got := bytesPerToken(&r, "b", proseText); !near(got, 2, 0.01) {
		t.Errorf("%v bytes a token, its first text had 2", got)
	}
}

func TestRatiosSurvive(t *testing.T) {
	old, fresh := Ratios{Seed: 5}, Ratios{Seed: 5}
	fresh.Restore(old.Learned())
	blocks := []uint64{1, 2, 3, 33, 34}
	old.Learn("a", blocks, 0, 64, 100)
	old.Learn("b", blocks, 0, 64, 60)
	fresh.Learn("b", blocks, 0, 64, 80)
	own := fresh.Weights("b", 64)
	fresh.Restore(old.Learned())
	if got, want := fresh.Weights("a", 64), old.Weights("a", 64); *got.Kinds != *want.Kinds {
		t.Errorf("%v, restored %v", *want.Kinds, *got.Kinds)
	}
	if got := fresh.Weights("b", 64); *got.Kinds != *own.Kinds {
		t.Error("what was learned since the start is lost")
	}
	bad := ModelRatios{Name: 9}
	fresh.Restore([]ModelRatios{bad})
	if n := len(fresh.Learned()); n != 3 {
		t.Errorf("%d ratios, want 3", n)
	}
}
