package events

import (
	"bytes"
	"math"
	"slices"
	"strconv"

	"github.com/tinylib/msgp/msgp"
)

type wire struct {
	// event has the fields that need no interpretation.
	event Event
	// why is the reason for leaving the event out, if it is left out.
	why Reason

	tag, medium, kind, locality []byte

	hashed  bool   // the event has block hashes
	salted  bool   // a field of its own has the salt, so that no extra key is one
	group   int    // -1 if the event names none
	adapter []byte // the name made of the adapter's id
	extra   []byte // begins with the extra keys; nil if there are none
}

// storedFields and removedFields are the fields of events that are arrays, by position. What follows
// does not matter.
var (
	storedFields = bytes.Fields([]byte("type block_hashes parent_block_hash token_ids block_size lora_id medium " +
		"lora_name extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality"))
	removedFields = bytes.Fields([]byte("type block_hashes medium " +
		"group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality"))
)

// readWire reads an event. It fails if the event is malformed or too large.
func (d *Decoder) readWire(r *reader, w *wire) {
	if r.is(msgp.MapType) {
		for n := r.mapping(); n > 0 && !r.bad; n-- {
			d.readField(r, w, r.key())
		}
		return
	}
	n := r.array()
	if n == 0 {
		r.fail()
		return
	}
	w.tag = r.text()
	var fields [][]byte
	switch string(w.tag) {
	case "BlockStored":
		fields = storedFields
	case "BlockRemoved":
		fields = removedFields
	default:
		r.skipAll(n - 1)
		return
	}
	for _, name := range fields[1:min(n, len(fields))] {
		d.readField(r, w, name)
	}
	r.skipAll(n - len(fields))
}

func (d *Decoder) readField(r *reader, w *wire, name []byte) {
	e := &w.event
	switch string(name) {
	case "type":
		w.tag = r.text()
	case "block_hashes":
		d.readHashes(r, w)
	case "parent_block_hash":
		if e.HasParent = !r.null(); e.HasParent {
			e.Parent = r.hash()
		}
	case "token_ids":
		d.readTokens(r, w)
	case "block_size":
		if !r.null() {
			e.BlockSize = int(r.natural(maxTokens))
		}
	case "lora_id":
		d.readLoraID(r, w)
	case "medium":
		w.medium = r.textOrOther()
	case "lora_name":
		if r.is(msgp.MapType) { // SGLang, from 0.5.18 on
			d.readMetadata(r, w)
			return
		}
		e.Adapter = w.short(r, r.optional())
	case "extra_keys":
		w.extra = r.b
		r.skip()
	case "group_idx":
		w.readGroup(r)
	case "kv_cache_spec_kind":
		w.kind = r.optional()
	case "locality":
		w.locality = r.optional()
	case "cache_salt":
		e.Salt = w.short(r, r.optional())
		w.salted = len(e.Salt) > 0
	case "session_id":
		e.Session = w.short(r, r.optional())
	case "metadata":
		d.readMetadata(r, w)
	default:
		r.skip()
	}
}

func (w *wire) tooLarge(r *reader) {
	w.why = TooLarge
	r.fail()
}

// short leaves an event out if a text is too long.
func (w *wire) short(r *reader, text []byte) []byte {
	if len(text) > maxText {
		w.tooLarge(r)
	}
	return text
}

func (w *wire) readGroup(r *reader) {
	if !r.null() {
		w.group = int(r.natural(math.MaxInt32))
	}
}

// readMetadata reads SGLang's map of a request's salt and session.
func (d *Decoder) readMetadata(r *reader, w *wire) {
	if !r.is(msgp.MapType) {
		r.skip()
		return
	}
	for n := r.mapping(); n > 0 && !r.bad; n-- {
		switch name := r.key(); string(name) {
		case "cache_salt", "session_id":
			d.readField(r, w, name)
		default:
			r.skip()
		}
	}
}

func (d *Decoder) readHashes(r *reader, w *wire) {
	n := r.array()
	if n > maxBlocks {
		w.tooLarge(r)
		return
	}
	begin := len(d.hashes)
	d.hashes = slices.Grow(d.hashes, n)
	for ; n > 0 && !r.bad; n-- {
		d.hashes = append(d.hashes, r.hash())
	}
	w.event.Hashes = slices.Clip(d.hashes[begin:])
	w.hashed = true
}

func (d *Decoder) readTokens(r *reader, w *wire) {
	w.event.Tokens = nil
	if r.null() {
		return
	}
	n := r.array()
	if n == 0 {
		return
	}
	if n > maxTokens {
		w.tooLarge(r)
		return
	}
	begin := len(d.tokens)
	if r.is(msgp.ArrayType) {
		d.tokens = r.bigrams(d.tokens, n)
	} else {
		d.tokens = r.tokens(d.tokens, n)
	}
	w.event.Tokens = slices.Clip(d.tokens[begin:])
}

// readLoraID makes a name of an adapter's id, a number or a string. Engines count adapters from
// 1 on; TensorRT-LLM's 0 means none.
func (d *Decoder) readLoraID(r *reader, w *wire) {
	w.adapter = nil
	if r.null() {
		return
	}
	begin := len(d.text)
	d.text = append(d.text, "lora_id:"...)
	prefix := len(d.text)
	if r.isText() {
		d.text = append(d.text, w.short(r, r.text())...)
	} else if id, minus := r.integer(); !minus && id > 0 {
		d.text = strconv.AppendUint(d.text, id, 10)
	}
	if len(d.text) > prefix {
		w.adapter = slices.Clip(d.text[begin:])
	}
}
