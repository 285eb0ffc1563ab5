package events

import (
	"slices"
	"strconv"
)

// parse reads an event into w. It returns false if the event must be left out.
func (d *Decoder) parse(r *reader, w *wire) bool {
	if isMap(r.lead()) {
		n, ok := r.mapping()
		for ; ok && n > 0; n-- {
			var key []byte
			if key, ok = r.key(); ok {
				ok = d.read(r, w, fieldOf(key))
			}
		}
		return ok && d.finish(r.b, w)
	}
	n, ok := r.array()
	if !ok || n == 0 || !d.read(r, w, tagField) {
		return false
	}
	var fields []field
	switch string(w.tag) {
	case "BlockStored":
		fields = storedFields[:]
	case "BlockRemoved":
		fields = removedFields[:]
	default:
		return r.skipAll(n-1) && d.finish(r.b, w)
	}
	for i, f := range fields[1:] {
		if i+1 < n && !d.read(r, w, f) {
			return false
		}
	}
	return d.tail(r, w, n-len(fields)) && d.finish(r.b, w)
}

// finish checks an event that has been read, and completes it.
func (d *Decoder) finish(payload []byte, w *wire) bool {
	switch string(w.tag) {
	case "BlockStored":
		w.event.Kind = Stored
	case "BlockRemoved":
		w.event.Kind = Removed
	case "AllBlocksCleared":
		w.event = Event{Kind: Cleared}
		return true
	case "":
		return false
	default:
		return w.refuse(UnknownTag)
	}
	switch {
	case !w.complete:
		return false
	case !d.group.delivers(w):
		return w.refuse(NotMainAttention)
	case w.remote:
		return w.refuse(Remote)
	case w.unknownMedium:
		return w.refuse(UnknownMedium)
	}
	if w.event.Kind == Removed {
		w.event = Event{Kind: Removed, Tier: w.event.Tier, Hashes: w.event.Hashes}
		return true
	}
	return d.finishStored(payload, w)
}

// finishStored checks that a Stored event agrees with itself, and reads its extra keys.
func (d *Decoder) finishStored(payload []byte, w *wire) bool {
	e := &w.event
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
	if d.unique.repeats(e.Hashes, e.Parent, e.HasParent) {
		return w.refuse(SelfReference)
	}
	return d.readExtra(payload, w)
}

func (d *Decoder) readHashes(r *reader, w *wire) bool {
	n, ok := r.array()
	if !ok {
		return false
	}
	if n > maxBlocks {
		return w.refuse(TooLarge)
	}
	begin := len(d.hashes)
	d.hashes = slices.Grow(d.hashes, n)
	for range n {
		hash, ok := r.hash()
		if !ok {
			return false
		}
		d.hashes = append(d.hashes, hash)
	}
	w.event.Hashes = slices.Clip(d.hashes[begin:])
	w.complete = true
	return true
}

func (d *Decoder) readTokens(r *reader, w *wire) bool {
	e := &w.event
	e.Tokens = nil
	if r.null() {
		return true
	}
	n, ok := r.array()
	if !ok || n == 0 {
		return ok
	}
	if n > maxTokens {
		return w.refuse(TooLarge)
	}
	begin := len(d.tokens)
	if isArray(r.lead()) {
		d.tokens, ok = r.bigrams(d.tokens, n)
	} else {
		d.tokens, ok = r.tokens(d.tokens, n)
	}
	e.Tokens = slices.Clip(d.tokens[begin:])
	return ok
}

// readLoraID reads an adapter's id, a number or a string. Engines count adapters from 1 on;
// TensorRT-LLM's 0 means none.
func (d *Decoder) readLoraID(r *reader, w *wire) bool {
	w.adapter = nil
	if r.null() {
		return true
	}
	begin := len(d.text)
	d.text = append(d.text, "lora_id:"...)
	if isText(r.lead()) {
		id, ok := r.text()
		if !ok || !w.fits(id) || len(id) == 0 {
			return ok && len(id) == 0
		}
		d.text = append(d.text, id...)
	} else {
		id, minus, ok := r.integer()
		if !ok || minus || id == 0 {
			return ok
		}
		d.text = strconv.AppendUint(d.text, id, 10)
	}
	w.adapter = slices.Clip(d.text[begin:])
	return true
}
