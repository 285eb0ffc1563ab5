package events

// mainGroup is the group of attention layers whose blocks are delivered.
type mainGroup struct {
	known bool
	group int
}

// delivers reports whether an event concerns the main group. The first event that marks a
// group as full attention decides which group that is. Groups without a kind follow the rule
// of vLLM before it sent kinds: group 0 is the main one.
func (g *mainGroup) delivers(w *wire) bool {
	if len(w.kind) == 0 {
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
// the storage of vLLM 0.26. An empty medium is the device.
func tierOf(medium []byte) (t Tier, known bool) {
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
		return Device, true
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		return Host, true
	case "CPU_TIER2", "DISK", "NVME", "STORAGE", "FS", "OBJ":
		return Disk, true
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED":
		return Shared, true
	}
	return 0, false
}

// readMedium reads the medium of an event's blocks.
func (w *wire) readMedium(r *reader) (ok bool) {
	w.event.Tier, w.unknownMedium = Device, false
	if r.null() {
		return true
	}
	if !isText(r.lead()) {
		w.unknownMedium = true
		return r.skip()
	}
	medium, ok := r.text()
	tier, known := tierOf(medium)
	w.event.Tier, w.unknownMedium = tier, !known
	return ok
}

// tail reads the last n elements of an event that is an array: group, kind, sliding window,
// locality and ownership. Some builds of vLLM for Dynamo leave out absent ones or put
// multimodal infos in front. A value's type therefore counts for more than its place.
func (d *Decoder) tail(r *reader, w *wire, n int) bool {
	place := 0
	for ; n > 0; n-- {
		var ok bool
		c := r.lead()
		switch {
		case isInteger(c) && place < 2 && w.group < 0:
			ok = w.readGroup(r)
		case isText(c) && place < 4:
			ok = w.readTailText(r, place)
		case isArray(c) && place == 0 && w.infos == 0:
			w.infos = r.i
			ok = r.skip()
			place--
		default: // null, sliding window, ownership, fields to come
			ok = r.skip()
		}
		if !ok {
			return false
		}
		place++
	}
	return true
}

// readTailText reads the kind or the locality.
func (w *wire) readTailText(r *reader, place int) bool {
	text, ok := r.text()
	switch {
	case len(text) == 0, string(text) == "LOCAL":
	case string(text) == "REMOTE", place == 3:
		w.remote = true
	case place < 3:
		w.kind = text
	}
	return ok
}
