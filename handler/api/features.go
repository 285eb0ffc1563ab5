package api

import (
	"bytes"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// maxFeatures and maxModalities bound what is read of a request's features.
const (
	maxFeatures   = 1024
	maxModalities = 8
)

// feature is one of the media among a prompt's token ids.
type feature struct {
	key        uint64 // see kvscore.MediaKey
	start, end int64  // in tokens
}

// placeFeatures adds the features to the blocks of the prompt's token ids, as engines do that
// name them in their KV events. Without their names and places, the prompt is unknown.
func (p *parse) placeFeatures() {
	b, r := p.body, p.req
	if !p.features.HasContent(b) {
		return
	}
	list, ok := p.readFeatures()
	if !ok || r.Kind != Tokens || r.ids.End == 0 || !orderFeatures(list, r.Tokens) {
		p.opaque = true
		return
	}
	r.ids = rawjson.Span{} // they are not the whole prompt
	seed, size := p.opt.Seed, p.opt.BlockSize
	addFeatures(seed, r.Blocks, 0, size, list)
	for i := range r.Chains {
		if c := &r.Chains[i]; c.BlockSize != size { // else it has r.Blocks
			addFeatures(seed, c.Blocks, 0, c.BlockSize, list)
		}
	}
	full := int64(len(r.Blocks) * size)
	if i := slices.IndexFunc(list, func(f feature) bool { return f.end > full }); i >= 0 {
		r.late = slices.Clone(list[i:])
	}
}

// addFeatures adds media to the blocks from a number on.
func addFeatures(seed uint64, blocks []uint64, from, size int, list []feature) {
	for i := range list {
		f := &list[i]
		for at := max(from, int(f.start)/size); at < len(blocks) && int64(at*size) < f.end; at++ {
			blocks[at] = kvscore.MediaBlock(seed, blocks[at], f.key, f.start-int64(at*size))
		}
	}
}

// orderFeatures sorts features by their places. It is not ok if they overlap, or if the prompt
// is shorter.
func orderFeatures(list []feature, tokens int64) (ok bool) {
	slices.SortFunc(list, func(a, b feature) int { return int(a.start - b.start) })
	at := int64(0)
	for i := range list {
		if list[i].start < at {
			return false
		}
		at = list[i].end
	}
	return at <= tokens
}

// modality is a kind of media, and a list of their names or places.
type modality struct {
	name string
	list rawjson.Span
}

// readFeatures reads {"mm_hashes":{modality:[name]},"mm_placeholders":{modality:[{"offset",
// "length"}]}}. It is not ok if that is not what the features are, or if there are too many.
func (p *parse) readFeatures() (list []feature, ok bool) {
	b := p.body
	var hashes, holders rawjson.Span
	if !p.features.Read(b, rawjson.To("mm_hashes", &hashes), rawjson.To("mm_placeholders", &holders)) {
		return nil, false
	}
	names, ok1 := readModalities(b, hashes)
	places, ok2 := readModalities(b, holders)
	if !ok1 || !ok2 || len(names) != len(places) {
		return nil, false
	}
	for _, m := range names {
		i := slices.IndexFunc(places, func(of modality) bool { return of.name == m.name })
		if i < 0 {
			return nil, false
		}
		if list, ok = p.readModality(list, m.list, places[i].list); !ok {
			return nil, false
		}
	}
	return list, true
}

// readModalities reads an object of lists. Of members of one name the last counts, as in vLLM.
func readModalities(b []byte, v rawjson.Span) (list []modality, ok bool) {
	if v.First(b) != '{' {
		return nil, false
	}
	c := rawjson.Enter(b, v.Start)
	for c.Next() {
		m := modality{name: c.Name()}
		m.list = c.Value()
		i := slices.IndexFunc(list, func(of modality) bool { return of.name == m.name })
		switch {
		case i >= 0:
			list[i] = m
		case len(list) == maxModalities || strings.ContainsRune(m.name, utf8.RuneError):
			return nil, false
		default:
			list = append(list, m)
		}
	}
	return list, c.Err == nil
}

// readModality reads a list of names and the list of their places.
func (p *parse) readModality(list []feature, names, places rawjson.Span) ([]feature, bool) {
	b := p.body
	if names.First(b) != '[' || places.First(b) != '[' {
		return nil, false
	}
	name, place := rawjson.Enter(b, names.Start), rawjson.Enter(b, places.Start)
	for name.Next() {
		raw, ok := name.Value().Str(b)
		if !ok || !place.Next() || len(list) == maxFeatures {
			return nil, false
		}
		var offset, length rawjson.Span
		ok = place.Value().Read(b, rawjson.To("offset", &offset), rawjson.To("length", &length))
		start, ok1 := integer(offset.Of(b))
		n, ok2 := integer(length.Of(b))
		const most = 1 << 31 // more than any prompt
		if !ok || !ok1 || !ok2 || start < 0 || n < 1 || start > most || n > most {
			return nil, false
		}
		if bytes.IndexByte(raw, '\\') >= 0 {
			raw = rawjson.AppendText(nil, raw)
		}
		if bytes.ContainsRune(raw, utf8.RuneError) { // may stand for several names, see rawjson.Runs
			return nil, false
		}
		list = append(list, feature{key: kvscore.MediaKey(p.opt.Seed, raw), start: start, end: start + n})
	}
	return list, !place.Next() && name.Err == nil && place.Err == nil
}
