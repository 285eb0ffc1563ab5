package events

import (
	"math"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/tinylib/msgp/msgp"
)

// pairs is a map in the order of its elements: key, value, key, value.
type pairs []any

// raw is a value that is encoded already.
type raw string

// appendValue appends a value in msgpack.
func appendValue(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return msgp.AppendNil(b)
	case raw:
		return append(b, v...)
	case bool:
		return msgp.AppendBool(b, v)
	case int:
		return msgp.AppendInt(b, v)
	case uint32:
		return msgp.AppendUint32(b, v)
	case uint64:
		return msgp.AppendUint64(b, v)
	case float64:
		return msgp.AppendFloat64(b, v)
	case string:
		return msgp.AppendString(b, v)
	case []byte:
		return msgp.AppendBytes(b, v)
	case []uint32:
		return appendValues(msgp.AppendArrayHeader(b, uint32(len(v))), v)
	case []uint64:
		return appendValues(msgp.AppendArrayHeader(b, uint32(len(v))), v)
	case []any:
		return appendValues(msgp.AppendArrayHeader(b, uint32(len(v))), v)
	case pairs:
		return appendValues(msgp.AppendMapHeader(b, uint32(len(v)/2)), v)
	}
	panic("the test's encoder does not know this type")
}

func appendValues[T any](b []byte, values []T) []byte {
	for _, v := range values {
		b = appendValue(b, v)
	}
	return b
}

func list(values ...any) []any { return values }

// llm-d's simulator begins a prompt with the parent 0.
func TestNoBlockHasTheNameZero(t *testing.T) {
	for name, event := range map[string]any{
		"map":   stored("parent_block_hash", 0),
		"array": list("BlockStored", []uint64{h1, h2}, 0, tokens, 4),
	} {
		var d Decoder
		if b := decode(t, &d, event); len(b.Events) != 1 || b.Events[0].HasParent {
			t.Errorf("%s: got %+v, wants an event without a parent", name, b.Events)
		}
	}
}

// stored is a map event with some of its values replaced or added.
func stored(other ...any) pairs {
	e := pairs{
		"type", "BlockStored", "block_hashes",
		[]uint64{h1, h2},
		"parent_block_hash", nil,
		"token_ids", tokens, "block_size", 4, "medium", "GPU",
	}
next:
	for i := 0; i < len(other); i += 2 {
		for k := 0; k < len(e); k += 2 {
			if e[k] == other[i] {
				e[k+1] = other[i+1]
				continue next
			}
		}
		e = append(e, other[i], other[i+1])
	}
	return e
}

func batchOf(events ...any) []byte { return appendValue(nil, list(1.5, events, 0)) }

// decode decodes a batch of events, which a good event follows.
func decode(t *testing.T, d *Decoder, events ...any) *Batch {
	t.Helper()
	b, err := d.Decode(batchOf(append(events, stored("lora_name", "last"))...))
	if err != nil {
		t.Fatal(err)
	}
	n := len(b.Events)
	if n == 0 || string(b.Events[n-1].Adapter) != "last" || len(b.Events[n-1].Tokens) != len(tokens) {
		t.Fatalf("the good event after the bad one is missing: %+v", b.Events)
	}
	b.Events = b.Events[:n-1]
	return b
}

func TestBadEventCostsOnlyItself(t *testing.T) {
	long := strings.Repeat("x", maxText+1)
	for name, test := range map[string]struct {
		event any
		want  Reason
	}{
		"null":                 {nil, Malformed},
		"number":               {5, Malformed},
		"empty array":          {list(), Malformed},
		"empty map":            {pairs{}, Malformed},
		"no tag":               {pairs{"block_hashes", []uint64{1}}, Malformed},
		"tag is a number":      {list(7, []uint64{1}), Malformed},
		"no hashes":            {pairs{"type", "BlockRemoved"}, Malformed},
		"no hashes, array":     {list("BlockStored"), Malformed},
		"hashes are a string":  {stored("block_hashes", "abc"), Malformed},
		"hash is a string":     {stored("block_hashes", list("abc")), Malformed},
		"hash is a float":      {stored("block_hashes", list(1.5)), Malformed},
		"hash without bytes":   {stored("block_hashes", list([]byte{})), Malformed},
		"parent is a map":      {stored("parent_block_hash", pairs{}), Malformed},
		"token is negative":    {stored("token_ids", list(1, 2, 3, 4, 5, 6, 7, -1)), Malformed},
		"token beyond 32 bits": {stored("token_ids", list(1, 2, 3, 4, 5, 6, 7, 1<<32)), Malformed},
		"token is a string":    {stored("token_ids", list(1, 2, 3, 4, 5, 6, 7, "8")), Malformed},
		"pairs and tokens":     {stored("token_ids", list(list(1, 2), 2)), Malformed},
		"triples":              {stored("token_ids", list(list(1, 2, 3))), Malformed},
		"block size negative":  {stored("block_size", -4), Malformed},
		"block size huge":      {stored("block_size", 1<<40, "token_ids", nil), Malformed},
		"adapter is a number":  {stored("lora_name", 5), Malformed},
		"salt is a number":     {stored("cache_salt", 5), Malformed},
		"group is a string":    {stored("group_idx", "a"), Malformed},
		"more keys than blocks": {
			stored("extra_keys", list(nil, nil, list("a"))), Malformed,
		},
		"unknown tag":       {list("BlockMoved", list(1)), UnknownTag},
		"unknown medium":    {stored("medium", "TAPE"), UnknownMedium},
		"long medium":       {stored("medium", long), UnknownMedium},
		"medium is a map":   {stored("medium", pairs{}), UnknownMedium},
		"sliding window":    {stored("kv_cache_spec_kind", "sliding_window"), NotMainAttention},
		"unknown kind":      {stored("kv_cache_spec_kind", "new_attention"), NotMainAttention},
		"another group":     {stored("group_idx", 1), NotMainAttention},
		"remote":            {stored("locality", "REMOTE"), Remote},
		"unknown locality":  {stored("locality", "NEARBY"), Remote},
		"one token missing": {stored("token_ids", tokens[:7]), BlockSizeMismatch},
		"no block size, one token missing": {
			stored("token_ids", tokens[:7], "block_size", 0), BlockSizeMismatch,
		},
		"tokens without blocks": {stored("block_hashes", list()), BlockSizeMismatch},
		"long adapter":          {stored("lora_name", long), TooLarge},
		"long adapter id":       {stored("lora_id", long), TooLarge},
		"long salt":             {stored("cache_salt", long), TooLarge},
		"long salt in keys":     {stored("extra_keys", list(list(long))), TooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			var d Decoder
			b := decode(t, &d, test.event)
			check(t, b, want{skipped: map[Reason]int{test.want: 1}})
		})
	}
}

func TestTiers(t *testing.T) {
	for medium, want := range map[any]cache.Tier{
		nil: cache.Device, "": cache.Device, "GPU": cache.Device, "DEVICE": cache.Device, "gpu": cache.Device,
		"CPU": cache.Host, "CPU_PINNED": cache.Host, "CPU_TIER1": cache.Host,
		"CPU_TIER2": cache.Disk, "DISK": cache.Disk, "NVME": cache.Disk, "STORAGE": cache.Disk, "FS": cache.Disk, "OBJ": cache.Disk,
		"EXTERNAL": cache.Shared, "NETWORK": cache.Shared, "REMOTE": cache.Shared, "SHARED": cache.Shared,
	} {
		var d Decoder
		b := decode(t, &d, stored("medium", medium), list("BlockRemoved", list(1), medium))
		if len(b.Events) != 2 || b.Events[0].Tier != want || b.Events[1].Tier != want {
			t.Errorf("medium %v: %+v, want tier %s", medium, b.Events, want)
		}
	}
	if names := cache.Device.String() + cache.Shared.String() + TooLarge.String() + NoRoom.String(); names != "devicesharedtoo_largeno_room" {
		t.Error(names)
	}
}

// TestMainGroup follows vLLM's hybrid models: each group of layers publishes its own blocks
// under equal names, and removals have only the group's number.
func TestMainGroup(t *testing.T) {
	const full, sliding = "full_attention", "sliding_window"
	var d Decoder
	b := decode(t, &d,
		stored("group_idx", 0, "kv_cache_spec_kind", sliding),
		stored("group_idx", 1, "kv_cache_spec_kind", full),
		stored("group_idx", 2, "kv_cache_spec_kind", full),
		pairs{"type", "BlockRemoved", "block_hashes", list(1), "group_idx", 0},
		pairs{"type", "BlockRemoved", "block_hashes", list(2), "group_idx", 1},
		pairs{"type", "BlockRemoved", "block_hashes", list(3), "group_idx", 2},
		pairs{"type", "BlockRemoved", "block_hashes", list(4)},
	)
	check(t, b, want{
		events:  []Event{storedEvent(nil), removed(cache.Device, 2), removed(cache.Device, 4)},
		skipped: map[Reason]int{NotMainAttention: 4},
	})

	// The next batch of the stream knows the group.
	b = decode(t, &d, pairs{"type", "BlockRemoved", "block_hashes", list(5), "group_idx", 1})
	check(t, b, want{events: []Event{removed(cache.Device, 5)}})

	// A restarted engine may have another model.
	d.Reset()
	b = decode(t, &d, stored("group_idx", 0), stored("group_idx", 1))
	check(t, b, want{events: []Event{storedEvent(nil)}, skipped: map[Reason]int{NotMainAttention: 1}})

	// Without a reset, the main group shows that it is none any more.
	decode(t, &d, stored("group_idx", 3, "kv_cache_spec_kind", full))
	b = decode(t, &d,
		stored("group_idx", 3, "kv_cache_spec_kind", sliding),
		stored("group_idx", 4, "kv_cache_spec_kind", full))
	check(t, b, want{events: []Event{storedEvent(nil)}, skipped: map[Reason]int{NotMainAttention: 1}})
}

func TestTailsOfArrays(t *testing.T) {
	event := func(tail ...any) []any {
		return append(list("BlockStored", []uint64{h1, h2}, nil, tokens, 4, nil, "GPU", nil, nil), tail...)
	}
	for name, test := range map[string]struct {
		tail []any
		want any // a reason, or nil if the event is delivered
	}{
		"none":                        {list(), nil},
		"group":                       {list(0), nil},
		"other group":                 {list(1), NotMainAttention},
		"group, kind":                 {list(1, "full_attention"), nil},
		"kind, window":                {list(nil, "sliding_window", 4096), NotMainAttention},
		"all":                         {list(0, "sink_full_attention", 4096, "LOCAL", "kvcr"), nil},
		"remote":                      {list(0, "full_attention", nil, "REMOTE"), Remote},
		"unknown locality":            {list(nil, nil, nil, "NEARBY", nil), Remote},
		"locality empty":              {list(nil, nil, nil, ""), nil},
		"group in another place":      {list(list(), 0), Malformed},
		"all and what is yet to come": {list(0, "full_attention", nil, "LOCAL", nil, "REMOTE", 5, list()), nil},
	} {
		t.Run(name, func(t *testing.T) {
			var d Decoder
			b := decode(t, &d, event(test.tail...))
			if reason, ok := test.want.(Reason); ok {
				check(t, b, want{skipped: map[Reason]int{reason: 1}})
			} else if len(b.Events) != 1 || b.Skipped != [Reasons]int{} {
				t.Errorf("%+v, skipped %v", b.Events, b.Skipped)
			}
		})
	}
}

func TestExtraKeys(t *testing.T) {
	other := func(block int, key string) ExtraKey { return ExtraKey{Block: block, Key: []byte(key)} }
	for name, test := range map[string]struct {
		event   pairs
		adapter string
		salt    string
		extra   []ExtraKey
	}{
		"none":                   {event: stored("extra_keys", nil)},
		"no list":                {event: stored("extra_keys", 5)},
		"fewer than blocks":      {event: stored("extra_keys", list(nil))},
		"salt":                   {event: stored("extra_keys", list(list("s"), nil)), salt: "s"},
		"salt, adapter later":    {event: stored("extra_keys", list(list("a", "s"), list("a")), "lora_name", "a"), adapter: "a", salt: "s"},
		"salt named":             {event: stored("cache_salt", "s"), salt: "s"},
		"salt twice":             {event: stored("extra_keys", list(list("s"), list("s")), "cache_salt", "s"), salt: "s"},
		"salt in metadata":       {event: stored("metadata", pairs{"x", 1, 5, 6, "cache_salt", "s", "block_size", 9}), salt: "s"},
		"salt empty":             {event: stored("extra_keys", list(list(""), nil), "cache_salt", "")},
		"salt after identifier":  {event: stored("extra_keys", list(list(image, "s"), nil)), salt: "s", extra: []ExtraKey{other(0, image)}},
		"two salts":              {event: stored("extra_keys", list(list("t"), nil), "cache_salt", "s"), salt: "s", extra: []ExtraKey{other(0, "t")}},
		"no salt below a parent": {event: stored("extra_keys", list(list("s"), nil), "parent_block_hash", uint64(3)), extra: []ExtraKey{other(0, "s")}},
		"no salt in later block": {event: stored("extra_keys", list(nil, list("s"))), extra: []ExtraKey{other(1, "s")}},
		"identifier":             {event: stored("extra_keys", list(nil, list(image))), extra: []ExtraKey{other(1, image)}},
		"identifier is adapter":  {event: stored("extra_keys", list(list(image), list(image)), "lora_name", image), adapter: image},
		"not hex":                {event: stored("extra_keys", list(nil, list(strings.Repeat("x", 64)))), extra: []ExtraKey{other(1, strings.Repeat("x", 64))}},
		"digest":                 {event: stored("extra_keys", list(list([]byte("d")), nil)), extra: []ExtraKey{other(0, "\xc4\x01d")}},
		"unlisted key":           {event: stored("extra_keys", list("s", list())), salt: "s"},
		"unknown keys": {
			event: stored("extra_keys", list(list(nil, raw("\x07"), raw("\xc2")), list(raw("\x93\x01\x02\x03"), raw("\x92\x01\x02")))),
			extra: []ExtraKey{other(0, "\x07"), other(0, "\xc2"), other(1, "\x93\x01\x02\x03"), other(1, "\x92\x01\x02")},
		},
		"adapter's id":   {event: stored("lora_id", 3), adapter: "lora_id:3"},
		"id is a string": {event: stored("lora_id", "ab"), adapter: "lora_id:ab"},
		"id and name":    {event: stored("lora_id", 3, "lora_name", "a"), adapter: "a"},
		"name and id":    {event: stored("lora_name", "a", "lora_id", 3), adapter: "a"},
		"id of none":     {event: stored("lora_id", 0, "lora_name", "")},
		"id below none":  {event: stored("lora_id", -1)},
	} {
		t.Run(name, func(t *testing.T) {
			var d Decoder
			b := decode(t, &d, test.event)
			wants := storedEvent(func(e *Event) {
				e.Adapter, e.Salt, e.Extra = []byte(test.adapter), []byte(test.salt), test.extra
			})
			if len(b.Events) == 1 {
				e := &b.Events[0]
				e.Parent, e.HasParent = 0, false
				// DeepEqual distinguishes nil from empty.
				e.Adapter, e.Salt = append([]byte{}, e.Adapter...), append([]byte{}, e.Salt...)
			}
			check(t, b, want{events: []Event{wants}})
		})
	}
}

func TestBlockSizes(t *testing.T) {
	for name, test := range map[string]struct {
		event pairs
		size  int
	}{
		"own":                 {stored(), 4},
		"zero is derived":     {stored("block_size", 0), 4},
		"null is derived":     {stored("block_size", nil), 4},
		"missing is derived":  {pairs{"type", "BlockStored", "block_hashes", []uint64{h1, h2}, "token_ids", tokens}, 4},
		"one token per block": {stored("block_hashes", []uint64{1, 2, 3, 4, 5, 6, 7, 8}, "block_size", 1), 1},
	} {
		var d Decoder
		b := decode(t, &d, test.event)
		if len(b.Events) != 1 || b.Events[0].BlockSize != test.size || len(b.Events[0].Tokens) != len(tokens) {
			t.Errorf("%s: %+v, want block size %d", name, b.Events, test.size)
		}
	}
	var d Decoder
	for _, event := range []any{stored("token_ids", nil), stored("token_ids", list()), list("BlockStored", []uint64{h1, h2})} {
		b := decode(t, &d, event)
		if len(b.Events) != 1 || b.Events[0].Tokens != nil || len(b.Events[0].Hashes) != 2 {
			t.Errorf("%+v, want an event that only names blocks", b.Events)
		}
	}
	if b := decode(t, &d, list("BlockRemoved", list())); len(b.Events) != 0 || b.Skipped != [Reasons]int{} {
		t.Errorf("%+v, skipped %v: an event about no block is none", b.Events, b.Skipped)
	}
}

// TestRemovedHasOnlyHashes checks that a removal does not get what only stores have.
func TestRemovedHasOnlyHashes(t *testing.T) {
	var d Decoder
	event := stored("type", "BlockRemoved", "parent_block_hash", 3, "cache_salt", "s", "locality", "", "extra_keys", list(list("a")))
	check(t, decode(t, &d, event), want{events: []Event{removed(cache.Device, h1, h2)}})
}

func TestNotABatch(t *testing.T) {
	good := batchOf(stored())
	for name, payload := range map[string][]byte{
		"empty":             {},
		"number":            {5},
		"string":            appendValue(nil, "batch"),
		"empty array":       appendValue(nil, list()),
		"time only":         appendValue(nil, list(1.5)),
		"events are null":   appendValue(nil, list(1.5, nil)),
		"map without them":  appendValue(nil, pairs{"ts", 1.5}),
		"events twice":      appendValue(nil, pairs{"events", list(), "events", list()}),
		"bytes after it":    append(batchOf(stored()), 0),
		"unused lead byte":  appendValue(nil, list(1.5, list(stored("x", raw("\xc1"))))),
		"claims an array":   {0x93, 0x01, 0xdd, 0xff, 0xff, 0xff, 0xff},
		"claims a map":      {0xdf, 0xff, 0xff, 0xff, 0xff},
		"claims a string":   append(append([]byte{0x92, 0x01, 0x91, 0xdb}, 0xff, 0xff, 0xff, 0xff), good...),
		"claims much below": []byte(strings.Repeat("\xdd\xff\xff\xff\xff", 100)),
	} {
		var d Decoder
		if b, err := d.Decode(payload); err != ErrNotBatch || b != nil {
			t.Errorf("%s: %+v, %v", name, b, err)
		}
	}
	var d Decoder
	if b, err := d.Decode(good); err != nil || len(b.Events) != 1 {
		t.Errorf("after errors: %+v, %v", b, err)
	}
}

func TestRanks(t *testing.T) {
	for name, test := range map[string]struct {
		batch any
		want  int
	}{
		"none":       {list(1.5, list()), -1},
		"null":       {list(1.5, list(), nil), -1},
		"number":     {list(1.5, list(), 7), 7},
		"negative":   {list(1.5, list(), -7), -1},
		"too large":  {list(1.5, list(), 1<<40), -1},
		"string":     {list(1.5, list(), "7"), -1},
		"vLLM's":     {pairs{"ts", nil, "events", list(), "data_parallel_rank", 7}, 7},
		"Dynamo's":   {pairs{"ts", math.NaN(), "events", list(), "dp_rank", 7}, 7},
		"SGLang's":   {pairs{"ts", math.Inf(1), "events", list(), "attn_dp_rank", 7}, 7},
		"map's none": {pairs{"events", list()}, -1},
	} {
		var d Decoder
		b, err := d.Decode(appendValue(nil, test.batch))
		if err != nil || b.Rank != test.want || b.Time != 0 && b.Time != 1.5 {
			t.Errorf("%s: %+v, %v, want rank %d", name, b, err, test.want)
		}
	}
}
