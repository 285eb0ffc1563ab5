package events

import (
	"bufio"
	"encoding/hex"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// fixture is a payload in testdata, see fixtures.py there.
type fixture struct {
	name    string
	payload []byte
}

// fixtures returns the payloads of a file: the last word of each line is the payload in
// hex, what is before it the name. Lines that begin with # are comments.
func fixtures(tb testing.TB, file string) (found []fixture) {
	tb.Helper()
	f, err := os.Open(filepath.Join("testdata", file))
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || line[0] == '#' {
			continue
		}
		payload, err := hex.DecodeString(line[i+1:])
		if err != nil {
			tb.Fatal(err)
		}
		found = append(found, fixture{line[:i], payload})
	}
	if lines.Err() != nil || len(found) == 0 {
		tb.Fatalf("reading %s: %d payloads, error %v", file, len(found), lines.Err())
	}
	return found
}

const (
	h1, h2, h3 = 0xdfaa000000000001, 0x1122334455667788, 0xe4521b066d9f753e
	parent     = 0x658532825eb08338
)

var (
	tokens = []uint32{1, 200, 70000, 4, 1, 200, 70000, 4}
	image  = strings.Repeat("a1", 32)
	digest = func() string {
		b := make([]byte, 32)
		for i := range b {
			b[i] = byte(i)
		}
		return string(b)
	}()
)

// storedEvent is the event that most fixtures contain.
func storedEvent(change func(*Event)) Event {
	e := Event{Kind: Stored, Hashes: []uint64{h1, h2}, Tokens: tokens, BlockSize: 4}
	if change != nil {
		change(&e)
	}
	return e
}

func removed(t cache.Tier, hashes ...uint64) Event {
	return Event{Kind: Removed, Tier: t, Hashes: hashes}
}

func withParent(e *Event) { e.Parent, e.HasParent = parent, true }

type want struct {
	rank    int
	events  []Event
	skipped map[Reason]int
}

func ofEngines() map[string]want {
	cleared := Event{Kind: Cleared}
	return map[string]want{
		"vllm-0.9":         {rank: -1, events: []Event{storedEvent(withParent), removed(cache.Device, h3), cleared}},
		"vllm-0.9-lora-id": {rank: -1, events: []Event{storedEvent(func(e *Event) { e.Adapter = []byte("lora_id:7") })}},
		"vllm-0.11":        {rank: 3, events: []Event{storedEvent(withParent), removed(cache.Host, h3)}},
		"vllm-0.19": {events: []Event{storedEvent(func(e *Event) {
			e.Adapter, e.Salt = []byte("ad1"), []byte("salt")
			e.Extra = []ExtraKey{
				{0, []byte("\x92\xd9\x40" + image + "\x02")}, {1, []byte("\x92\xd9\x40" + image + "\xfe")}, {1, []byte("\xc4\x20" + digest)},
			}
		}), removed(cache.Device, h3)}},
		"vllm-0.17-media": {events: []Event{storedEvent(func(e *Event) {
			e.Salt, e.Extra = []byte("salt"), []ExtraKey{{1, []byte(image)}}
		})}},
		"vllm-0.23": {
			events:  []Event{storedEvent(func(e *Event) { e.Tier = cache.Host }), removed(cache.Device, h1), cleared},
			skipped: map[Reason]int{NotMainAttention: 2, Remote: 1},
		},
		"vllm-0.26": {events: []Event{storedEvent(withParent)}},
		"vllm-bytes": {events: []Event{storedEvent(func(e *Event) {
			e.Hashes = []uint64{0x18191a1b1c1d1e1f, 0x0706050403020100}
			e.Parent, e.HasParent = 0x0101010101010101, true
		})}},
		"vllm-offload": {events: []Event{{Kind: Stored, Tier: cache.Host, Hashes: []uint64{h1, h2}}}},
		"vllm-maps":    {rank: 5, events: []Event{storedEvent(withParent), cleared}},
		// A salt of 64 hex digits stays a salt.
		"salt-hex": {events: []Event{storedEvent(func(e *Event) { e.Salt = []byte(image) })}},
		"salt-adapter": {events: []Event{storedEvent(func(e *Event) {
			e.Adapter, e.Salt = []byte("ad1"), []byte("ad1")
		})}},
		"lora-keys": {events: []Event{storedEvent(func(e *Event) {
			withParent(e)
			e.Adapter = []byte("ad1")
		})}},
		"sglang-0.5.3": {rank: -1, events: []Event{storedEvent(func(e *Event) {
			e.Parent, e.HasParent = h3, true
		}), removed(cache.Device, h1)}},
		"sglang-0.5.18": {rank: 1, events: []Event{storedEvent(func(e *Event) {
			e.Tier, e.Salt, e.Session = cache.Host, []byte("s1"), []byte("chat-7")
		})}},
		"sglang-0.5.21": {events: []Event{{
			Kind: Stored, Hashes: []uint64{h1, h2, h3}, Parent: parent, HasParent: true,
			Tokens: []uint32{5, 151643, 7}, BlockSize: 1, Salt: []byte("s1"), Session: []byte("chat-7"),
		}, removed(cache.Disk, h1)}},
		"sglang-eagle": {events: []Event{{
			Kind: Stored, Hashes: []uint64{h1, h2}, Tokens: []uint32{1, 2, 70000, 4}, BlockSize: 2,
		}}},
		"trtllm":      {events: []Event{storedEvent(nil), removed(cache.Device, h2)}},
		"unknown-tag": {events: []Event{storedEvent(withParent)}, skipped: map[Reason]int{UnknownTag: 2}},
		"int-widths": {events: []Event{removed(cache.Device,
			5, 1<<64-1, 1<<64-7, 1<<64-300, 1<<64-70000, 1<<64-5, 9, 9, 9, 9)}},
		"more-elements": {events: []Event{storedEvent(nil), removed(cache.Device, h3)}},
		"more-keys":     {rank: 2, events: []Event{storedEvent(withParent)}},
	}
}

func TestBatchesOfEngines(t *testing.T) {
	wants := ofEngines()
	for _, f := range fixtures(t, "fixtures.txt") {
		t.Run(f.name, func(t *testing.T) {
			want, ok := wants[f.name]
			if !ok {
				t.Fatal("the test expects nothing of this fixture")
			}
			delete(wants, f.name)
			var d Decoder
			b, err := d.Decode(f.payload)
			if err != nil {
				t.Fatal(err)
			}
			if ts := 1789095808.75; b.Time != ts && f.name != "more-keys" {
				t.Errorf("time is %f, want %f", b.Time, ts)
			}
			check(t, b, want)
		})
	}
	for name := range wants {
		t.Errorf("%s: there is no such fixture", name)
	}
}

func check(t *testing.T, b *Batch, want want) {
	t.Helper()
	if b.Rank != want.rank {
		t.Errorf("rank is %d, want %d", b.Rank, want.rank)
	}
	if len(b.Events) != len(want.events) {
		t.Fatalf("%d events, want %d; skipped %v", len(b.Events), len(want.events), b.Skipped)
	}
	for i := range b.Events {
		if !reflect.DeepEqual(b.Events[i], want.events[i]) {
			t.Errorf("event %d is\n%+v, want\n%+v", i, b.Events[i], want.events[i])
		}
	}
	for reason, n := range b.Skipped {
		if n != want.skipped[Reason(reason)] {
			t.Errorf("%d events skipped as %s, want %d", n, Reason(reason), want.skipped[Reason(reason)])
		}
	}
}

// capture is what an independent decoder found in one of the batches captured from vLLM.
type capture struct {
	events, rank          int
	first, last           uint64
	parent                uint64 // 0 is none
	blockSize             int
	tokens                int
	firstToken, lastToken uint32
	sum                   int // of the tokens
	adapter, salt         string
}

// captured are the batches of testdata/vllm-events.txt in order.
var captured = []capture{
	{events: 1, first: 0xdae9d47fd0845ae2, last: 0x77147564674a2426, blockSize: 128, tokens: 384, firstToken: 1, lastToken: 323, sum: 237223},
	{events: 1, first: 0xdf02a13aa9558e45, last: 0x658532825eb08338, blockSize: 32, tokens: 64, firstToken: 1910, lastToken: 328, sum: 45071},
	{events: 1, first: 0xe4521b066d9f753e, last: 0xe4521b066d9f753e, parent: 0x658532825eb08338, blockSize: 32, tokens: 32, firstToken: 333, lastToken: 492, sum: 28026},
	{events: 1, first: 0x51f189e317ba570b, last: 0x51f189e317ba570b, parent: 0xe4521b066d9f753e, blockSize: 32, tokens: 32, firstToken: 1985, lastToken: 492, sum: 39632},
	{events: 1, first: 0x3d6a740a853be6e3, last: 0x3d6a740a853be6e3, parent: 0xdc3c618d059a46a1, blockSize: 32, tokens: 32, firstToken: 263, lastToken: 293, sum: 21958},
	{events: 1, first: 0x1bb817d7ad008419, last: 0x1bce434c4c0ef832, blockSize: 32, tokens: 96, firstToken: 1853, lastToken: 1164, sum: 65438, salt: "tenant-A"},
	{events: 1, first: 0x5c7470200c993ebd, last: 0xddeb4ac231672393, blockSize: 32, tokens: 64, firstToken: 472, lastToken: 755, sum: 40203},
	{events: 1, first: 0xdf02a13aa9558e45, last: 0x51f189e317ba570b, blockSize: 32, tokens: 128, firstToken: 1910, lastToken: 492, sum: 112729},
	{events: 30, first: 0xccaf2c2b7fa349a, last: 0x3ae2c9a2488211d, parent: 0x663a6164ee145958, blockSize: 32, tokens: 896, firstToken: 1006, lastToken: 334, sum: 548557},
	{events: 2, first: 0xdf02a13aa9558e45, last: 0x9e359927d31e571d, blockSize: 32, tokens: 96, firstToken: 1910, lastToken: 292, sum: 64116},
	{events: 1, first: 0x3d0b9ab71c8b1874, last: 0x3d0b9ab71c8b1874},
	{events: 1, first: 0x2f3d499c4d0f159f, last: 0x52a2a6aa577e57dc, blockSize: 64, tokens: 128, firstToken: 1910, lastToken: 894, sum: 81736, adapter: "ad1"},
	{events: 1, first: 0x252d887e07814f0, last: 0x3c6d625237d1803c, blockSize: 64, tokens: 128, firstToken: 1910, lastToken: 894, sum: 81736, adapter: "ad1", salt: "s1"},
	{events: 1, rank: 1, first: 0x1caa4b21d1d61e77, last: 0xc7fa08c409125566, blockSize: 32, tokens: 96, firstToken: 300, lastToken: 395, sum: 33360},
}

// TestCapturesOfVLLM reads what a real vLLM 0.32 has published.
func TestCapturesOfVLLM(t *testing.T) {
	var d Decoder
	for i, f := range fixtures(t, "vllm-events.txt") {
		if i >= len(captured) {
			t.Fatalf("batch %d: the test expects nothing of it", i)
		}
		b, err := d.Decode(f.payload)
		if err != nil {
			t.Fatal(err)
		}
		e := &b.Events[len(b.Events)-1]
		got := capture{
			events: len(b.Events), rank: b.Rank, first: e.Hashes[0], last: e.Hashes[len(e.Hashes)-1], parent: e.Parent,
			blockSize: e.BlockSize, tokens: len(e.Tokens), adapter: string(e.Adapter), salt: string(e.Salt),
		}
		if n := len(e.Tokens); n > 0 {
			got.firstToken, got.lastToken = e.Tokens[0], e.Tokens[n-1]
		}
		for _, token := range e.Tokens {
			got.sum += int(token)
		}
		if got != captured[i] {
			t.Errorf("batch %d is\n%+v, want\n%+v", i, got, captured[i])
		}
		if b.Skipped != [Reasons]int{} || e.Extra != nil || e.HasParent != (e.Parent != 0) || b.Time < 1.79e9 || b.Time > 1.8e9 {
			t.Errorf("batch %d: skipped %v, extra keys %v, time %f", i, b.Skipped, e.Extra, b.Time)
		}
	}
}
