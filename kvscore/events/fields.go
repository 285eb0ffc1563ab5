package events

import "math"

// wire is an event while it is read.
type wire struct {
	event Event
	tag   []byte
	// why is the reason for leaving the event out once a function has returned false.
	why Reason
	// complete says that the event has block hashes.
	complete bool
	// unknownMedium says that the medium belongs to no tier, remote that the blocks are not
	// local to the worker.
	unknownMedium, remote bool
	// salted says that a field of its own has the salt, so that no extra key is one.
	salted bool
	kind   []byte
	group  int // -1 if the event names none
	// adapter is the name made of the adapter's id.
	adapter []byte
	// extra and infos are the positions of the extra keys and of Dynamo's multimodal
	// infos, 0 if there are none.
	extra, infos int
}

// refuse records why an event is left out. It returns false.
func (w *wire) refuse(why Reason) bool {
	w.why = why
	return false
}

// field is a part of an event.
type field uint8

const (
	unknownField field = iota
	tagField
	hashesField
	parentField
	tokensField
	blockSizeField
	loraIDField
	mediumField
	loraNameField
	extraKeysField
	groupField
	kindField
	localityField
	saltField
	metadataField
	infosField
)

// storedFields and removedFields are the fields of events that are arrays, by position.
// [wire.tail] reads what follows.
var (
	storedFields = [...]field{
		tagField, hashesField, parentField, tokensField, blockSizeField,
		loraIDField, mediumField, loraNameField, extraKeysField,
	}
	removedFields = [...]field{tagField, hashesField, mediumField}
)

// fieldOf returns the field with a name.
func fieldOf(name []byte) field {
	switch string(name) {
	case "type":
		return tagField
	case "block_hashes":
		return hashesField
	case "parent_block_hash":
		return parentField
	case "token_ids":
		return tokensField
	case "block_size":
		return blockSizeField
	case "lora_id":
		return loraIDField
	case "medium":
		return mediumField
	case "lora_name":
		return loraNameField
	case "extra_keys":
		return extraKeysField
	case "group_idx":
		return groupField
	case "kv_cache_spec_kind":
		return kindField
	case "locality":
		return localityField
	case "cache_salt":
		return saltField
	case "metadata":
		return metadataField
	case "block_mm_infos":
		return infosField
	}
	return unknownField
}

// read reads one field. It returns false if the event must be left out.
func (d *Decoder) read(r *reader, w *wire, f field) (ok bool) {
	e := &w.event
	switch f {
	case tagField:
		w.tag, ok = r.text()
	case hashesField:
		return d.readHashes(r, w)
	case parentField:
		e.HasParent = !r.null()
		if !e.HasParent {
			return true
		}
		e.Parent, ok = r.hash()
		e.HasParent = e.Parent != 0 // llm-d's simulator begins a prompt with 0
	case tokensField:
		return d.readTokens(r, w)
	case blockSizeField:
		e.BlockSize, ok = r.size()
	case loraIDField:
		return d.readLoraID(r, w)
	case mediumField:
		return w.readMedium(r)
	case loraNameField:
		if isMap(r.lead()) { // SGLang, from 0.5.18 on
			return d.readMetadata(r, w)
		}
		return w.readAdapter(r)
	case extraKeysField:
		w.extra = r.i
		ok = r.skip()
	case infosField:
		w.infos = r.i
		ok = r.skip()
	case groupField:
		return w.readGroup(r)
	case kindField:
		w.kind, ok = r.optional()
	case localityField:
		return w.readLocality(r)
	case saltField:
		e.Salt, ok = r.optional()
		ok = ok && w.fits(e.Salt)
		w.salted = len(e.Salt) > 0
	case metadataField:
		return d.readMetadata(r, w)
	case unknownField:
		ok = r.skip()
	}
	return ok
}

// size reads a block size, 0 for null.
func (r *reader) size() (int, bool) {
	if r.null() {
		return 0, true
	}
	v, minus, ok := r.integer()
	return int(v), ok && !minus && v <= maxTokens
}

// fits refuses an event with a text that is too long.
func (w *wire) fits(text []byte) bool {
	return len(text) <= maxText || w.refuse(TooLarge)
}

func (w *wire) readAdapter(r *reader) bool {
	name, ok := r.optional()
	if !ok || !w.fits(name) {
		return false
	}
	w.event.Adapter = name
	return true
}

func (w *wire) readGroup(r *reader) bool {
	if r.null() {
		return true
	}
	v, minus, ok := r.integer()
	if !ok || minus || v > math.MaxInt32 {
		return false
	}
	w.group = int(v)
	return true
}

func (w *wire) readLocality(r *reader) bool {
	where, ok := r.optional()
	w.remote = len(where) > 0 && string(where) != "LOCAL"
	return ok
}

// readMetadata reads the salt from SGLang's map of a request's salt and session.
func (d *Decoder) readMetadata(r *reader, w *wire) bool {
	if !isMap(r.lead()) {
		return r.skip()
	}
	n, ok := r.mapping()
	for ; ok && n > 0; n-- {
		var key []byte
		if key, ok = r.key(); !ok {
			return false
		}
		f := fieldOf(key)
		if f != saltField {
			f = unknownField
		}
		ok = d.read(r, w, f)
	}
	return ok
}
