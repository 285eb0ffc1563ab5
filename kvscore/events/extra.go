package events

import (
	"bytes"
	"slices"
)

// maxExtra is how many extra keys a batch may have.
const maxExtra = 1 << 16

// readExtra reads what the blocks' content depends on besides tokens.
//
// vLLM lists for each block: the adapter's name, identifiers of media, in the prompt's first
// block the salt, digests of prompt embeddings. Builds of vLLM for Dynamo list the media a second
// time. The decoder understands the adapter and the salt; any other key keeps its block apart.
//
// Before vLLM 0.19, an identifier was a plain string, just as the salt. In the first block the
// decoder takes the last plain string for the salt. A mistake costs overlap and never isolation:
// the string distinguishes the blocks either way.
func (d *Decoder) readExtra(payload []byte, w *wire) bool {
	begin := len(d.extra)
	for _, at := range [...]int{w.extra, w.infos} {
		if at > 0 && !d.readBlockKeys(&reader{payload, at}, w) {
			return false
		}
	}
	if len(d.extra) > begin {
		w.event.Extra = slices.Clip(d.extra[begin:])
	}
	return true
}

// readBlockKeys reads an array with an element for each block: null, a list of keys, or one key.
func (d *Decoder) readBlockKeys(r *reader, w *wire) bool {
	if !isArray(r.lead()) {
		return true
	}
	n, ok := r.array()
	for block := 0; ok && block < n; block++ {
		if r.null() {
			continue
		}
		if block >= len(w.event.Hashes) {
			return false
		}
		keys := 1
		if isArray(r.lead()) {
			keys, ok = r.array()
		}
		adapter := w.event.Adapter // until it has been seen in this block
		for ; ok && keys > 0; keys-- {
			if len(d.extra) >= maxExtra {
				return w.refuse(TooLarge)
			}
			ok = d.readKey(r, w, block, &adapter)
		}
	}
	return ok
}

func (d *Decoder) readKey(r *reader, w *wire, block int, adapter *[]byte) bool {
	start, c := r.i, r.lead()
	if isText(c) && !isBytes(c) {
		key, ok := r.text()
		if ok && len(*adapter) > 0 && bytes.Equal(key, *adapter) {
			*adapter = nil
			return true
		}
		return ok && d.readPlain(w, block, key)
	}
	ok := r.skip()
	if ok && c != null {
		d.keepApart(block, r.b[start:r.i:r.i])
	}
	return ok
}

// readPlain takes a plain string for the salt or for another key.
func (d *Decoder) readPlain(w *wire, block int, key []byte) bool {
	e := &w.event
	switch {
	case len(key) == 0, bytes.Equal(key, e.Salt):
		return true
	case w.salted, block > 0, e.HasParent:
		d.keepApart(block, key)
		return true
	case len(e.Salt) > 0: // the string before was no salt
		d.keepApart(block, e.Salt)
	}
	e.Salt = key
	return w.fits(key)
}

func (d *Decoder) keepApart(block int, key []byte) {
	d.extra = append(d.extra, ExtraKey{Block: block, Key: key})
}
