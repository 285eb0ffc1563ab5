package events

import (
	"bytes"
	"slices"
)

// dynamoSalt is what Dynamo puts in front of the salts that it sends to vLLM.
var dynamoSalt = []byte("dynamo-cache-salt:")

// maxMedia is how many media keys a batch may have.
const maxMedia = 1 << 16

// readExtra reads what the blocks' content depends on besides tokens: vLLM's extra keys, or
// Dynamo's multimodal infos if there are no extra keys.
//
// vLLM lists, for each block: the adapter's name, the media's identifiers, in the prompt's
// first block the salt, digests of prompt embeddings. Since 0.19 an identifier comes with its
// offset; before, it was a plain string, just as the salt. Those versions take no requests with
// identifiers, so such a string only keeps its block apart ([Other]). In the first block the
// decoder takes the last plain string for the salt. A mistake costs overlap and never isolation:
// the string distinguishes the blocks either way, and vLLM cannot tell the two apart either.
func (d *Decoder) readExtra(payload []byte, w *wire) bool {
	e := &w.event
	e.Salt = bytes.TrimPrefix(e.Salt, dynamoSalt)
	w.salted = len(e.Salt) > 0
	begin := len(d.media)
	if w.extra > 0 && !d.readBlockKeys(&reader{payload, w.extra}, w, true) {
		return false
	}
	if w.infos > 0 && len(d.media) == begin && !d.readBlockKeys(&reader{payload, w.infos}, w, false) {
		return false
	}
	if len(d.media) > begin {
		e.Media = slices.Clip(d.media[begin:])
	}
	return len(d.media) <= maxMedia || w.refuse(TooLarge)
}

// readBlockKeys reads an array with an element for each block: null or, if listed, a list of
// the block's keys. Anything else is one key.
func (d *Decoder) readBlockKeys(r *reader, w *wire, listed bool) bool {
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
		if listed && isArray(r.lead()) {
			keys, ok = r.array()
		}
		adapter := w.event.Adapter // until it has been seen in this block
		for ; ok && keys > 0; keys-- {
			if len(d.media) > maxMedia {
				return w.refuse(TooLarge)
			}
			ok = d.readKey(r, w, block, &adapter)
		}
	}
	return ok
}

func (d *Decoder) readKey(r *reader, w *wire, block int, adapter *[]byte) bool {
	start, c := r.i, r.lead()
	switch {
	case c == null:
		return r.skip()
	case isBytes(c):
		key, ok := r.text()
		d.addMedia(block, Embeds, key)
		return ok
	case isText(c):
		key, ok := r.text()
		if ok && len(*adapter) > 0 && bytes.Equal(key, *adapter) {
			*adapter = nil
			return true
		}
		return ok && d.readPlain(w, block, key)
	}
	if key, offset, ok := r.located(); ok {
		d.media = append(d.media, MediaKey{Block: block, Kind: Identifier, Key: key, Offset: offset})
		return true
	}
	r.i = start
	ok := r.skip()
	if ok {
		d.addMedia(block, Other, r.b[start:r.i:r.i])
	}
	return ok
}

// located reads an identifier with its offset.
func (r *reader) located() (key []byte, offset int64, ok bool) {
	n, ok := r.array()
	if !ok || n != 2 {
		return nil, 0, false
	}
	if key, ok = r.text(); !ok {
		return nil, 0, false
	}
	v, _, ok := r.integer()
	return key, int64(v), ok
}

// readPlain takes a plain string for the salt or for a media key.
func (d *Decoder) readPlain(w *wire, block int, key []byte) bool {
	e := &w.event
	salt, tagged := bytes.CutPrefix(key, dynamoSalt)
	switch {
	case len(salt) == 0, bytes.Equal(salt, e.Salt):
		w.salted = w.salted || tagged
		return true
	case w.salted, !tagged && (block > 0 || e.HasParent):
		d.addMedia(block, Other, key)
		return true
	case len(e.Salt) > 0: // the string before was no salt
		d.addMedia(block, Other, e.Salt)
	}
	e.Salt, w.salted = salt, tagged
	return w.fits(salt)
}

func (d *Decoder) addMedia(block int, kind MediaKind, key []byte) {
	d.media = append(d.media, MediaKey{Block: block, Kind: kind, Key: key})
}
