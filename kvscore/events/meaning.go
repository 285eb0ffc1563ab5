package events

import (
	"bytes"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/tinylib/msgp/msgp"
)

const local = "LOCAL"

// refuse records why an event is left out. It returns false.
func (w *wire) refuse(why Reason) bool {
	w.why = why
	return false
}

// interpret completes an event that has been read. It returns false if the event is left out.
func (d *Decoder) interpret(w *wire) bool {
	e := &w.event
	switch string(w.tag) {
	case "BlockStored":
		e.Kind = Stored
	case "BlockRemoved":
		e.Kind = Removed
	case "AllBlocksCleared":
		*e = Event{Kind: Cleared}
		return true
	case "":
		return w.refuse(Malformed)
	default:
		return w.refuse(UnknownTag)
	}
	tier, known := tierOf(w.medium)
	switch {
	case !w.hashed:
		return w.refuse(Malformed)
	case !d.group.delivers(w):
		return w.refuse(NotMainAttention)
	case len(w.locality) > 0 && string(w.locality) != local:
		return w.refuse(Remote)
	case !known:
		return w.refuse(UnknownMedium)
	}
	e.Tier = tier
	if e.Kind == Removed {
		*e = Event{Kind: Removed, Tier: tier, Hashes: e.Hashes}
		return true
	}
	return d.interpretStored(w)
}

func (d *Decoder) interpretStored(w *wire) bool {
	e := &w.event
	e.HasParent = e.HasParent && e.Parent != 0 // llm-d's simulator begins a prompt with 0
	if len(e.Adapter) == 0 {
		e.Adapter = w.adapter
	}
	blocks := len(e.Hashes)
	if e.BlockSize == 0 && blocks > 0 {
		e.BlockSize = len(e.Tokens) / blocks
	}
	if len(e.Tokens) > 0 && len(e.Tokens) != blocks*e.BlockSize {
		return w.refuse(BlockSizeMismatch)
	}
	return d.interpretExtra(w)
}

// interpretExtra finds out what the blocks' content depends on besides tokens.
//
// vLLM lists for each block: the adapter's name, identifiers of media, in the prompt's first
// block the salt, digests of prompt embeddings. The decoder understands the adapter and the salt; any
// other key keeps its block apart.
//
// Before vLLM 0.19, an identifier was a plain string, just as the salt. In the first block the
// decoder takes the last plain string for the salt. A mistake costs overlap and never isolation:
// the string distinguishes the blocks either way.
func (d *Decoder) interpretExtra(w *wire) bool {
	begin, r := len(d.extra), reader{b: w.extra}
	if r.is(msgp.ArrayType) {
		d.readBlockKeys(&r, w)
	}
	if len(d.extra) > begin {
		w.event.Extra = slices.Clip(d.extra[begin:])
	}
	return !r.bad
}

// readBlockKeys reads an array with an element for each block: null, a list of keys, or one key.
func (d *Decoder) readBlockKeys(r *reader, w *wire) {
	n := r.array()
	for block := 0; block < n && !r.bad; block++ {
		if r.null() {
			continue
		}
		if block >= len(w.event.Hashes) {
			r.fail()
			return
		}
		keys := 1
		if r.is(msgp.ArrayType) {
			keys = r.array()
		}
		adapter := w.event.Adapter // until it has been seen in this block
		for ; keys > 0 && !r.bad; keys-- {
			d.readKey(r, w, block, &adapter)
		}
	}
}

func (d *Decoder) readKey(r *reader, w *wire, block int, adapter *[]byte) {
	kind := r.kind()
	key := r.textOrOther()
	switch {
	case r.bad, kind == msgp.NilType:
	case len(d.extra) >= maxExtra:
		w.tooLarge(r)
	case kind != msgp.StrType:
		d.keepApart(block, key)
	case len(*adapter) > 0 && bytes.Equal(key, *adapter):
		*adapter = nil
	default:
		d.readPlain(r, w, block, key)
	}
}

// readPlain takes a plain string for the salt or for another key.
func (d *Decoder) readPlain(r *reader, w *wire, block int, key []byte) {
	e := &w.event
	switch {
	case len(key) == 0, bytes.Equal(key, e.Salt):
		return
	case w.salted, block > 0, e.HasParent:
		d.keepApart(block, key)
		return
	case len(e.Salt) > 0: // the string before was no salt
		d.keepApart(block, e.Salt)
	}
	e.Salt = w.short(r, key)
}

func (d *Decoder) keepApart(block int, key []byte) {
	d.extra = append(d.extra, ExtraKey{Block: block, Key: key})
}

// mainGroup is the group of attention layers whose blocks are delivered. Some engines keep
// several groups, and publish the blocks of each under equal names. The decoder delivers only
// the first group that an event marks as full attention, and group 0 as long as no event marks
// one. It remembers that group, because a removal has only the group's number.
type mainGroup struct {
	known bool
	group int
}

// delivers reports whether an event concerns the main group.
func (g *mainGroup) delivers(w *wire) bool {
	if len(w.kind) == 0 { // vLLM before it sent kinds, and removals
		return w.group < 0 || w.group == g.group
	}
	main := isMain(w.kind)
	switch {
	case w.group < 0:
		return main
	case main && !g.known:
		*g = mainGroup{known: true, group: w.group}
	case !main && g.known && w.group == g.group: // another model has taken over
		*g = mainGroup{}
	}
	return main && w.group == g.group
}

// isMain reports whether layers of a kind look back to the prompt's first token, so that they
// keep each block of it.
func isMain(kind []byte) bool {
	switch string(kind) {
	case "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

// tierOf returns the tier of a medium, see kv_events.py of vLLM and of SGLang. FS and OBJ are
// the storage of vLLM 0.26. No medium is the device.
func tierOf(medium []byte) (t cache.Tier, known bool) {
	var upper [16]byte
	if len(medium) > len(upper) {
		return 0, false
	}
	for i, c := range medium {
		if c >= 'a' && c <= 'z' {
			c -= 'a' - 'A'
		}
		upper[i] = c
	}
	switch string(upper[:len(medium)]) {
	case "", "GPU", "DEVICE":
		return cache.Device, true
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		return cache.Host, true
	case "CPU_TIER2", "DISK", "NVME", "STORAGE", "FS", "OBJ":
		return cache.Disk, true
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED":
		return cache.Shared, true
	}
	return 0, false
}
