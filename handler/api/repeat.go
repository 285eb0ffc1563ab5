package api

import "bytes"

// repeat remembers what surrounds the text in the last chunk that had nothing but
// text. Most chunks of a stream differ from the one before in that text alone: to
// read them takes a third of the time.
type repeat struct {
	around []byte // of that chunk, without its text; empty if there is none
	at     int    // where the text was
	off    bool   // tests compare with this

	// of the chunk being read
	chunk bool   // it has the form that can be remembered
	texts int    // pieces of text in it
	text  []byte // the last of them
	chat  bool   // it was read as a message's
}

const maxRepeat = 4096 // bytes of a chunk

// again reads a chunk if it repeats the one before, and returns whether it does.
func (a *Answer) again(data []byte) bool {
	r := &a.repeat
	end := len(data) - (len(r.around) - r.at)
	if len(r.around) == 0 || end <= r.at ||
		!bytes.Equal(data[:r.at], r.around[:r.at]) || !bytes.Equal(data[end:], r.around[r.at:]) {
		return false
	}
	raw := data[r.at:end]
	for _, c := range raw {
		if c == '"' || c == '\\' {
			return false // the text may end elsewhere
		}
	}
	if r.chat {
		a.chatText(raw)
	} else {
		a.text(raw)
	}
	return true
}

// remember keeps what surrounds the text of a chunk that had nothing else: all else is the same
// as before.
func (a *Answer) remember(data []byte, same bool) {
	r := &a.repeat
	r.around = r.around[:0]
	textOnly := r.chunk && r.texts == 1 && len(r.text) > 0 && same
	if !a.stream || r.off || !textOnly || len(data) > maxRepeat {
		return
	}
	var buf [64]byte
	quoted := append(append(append(buf[:0], '"'), r.text...), '"')
	at := bytes.Index(data, quoted) + 1
	if at == 0 || at <= bytes.LastIndex(data, quoted) {
		return // the text stands somewhere else, too
	}
	r.around, r.at = append(append(r.around, data[:at]...), data[at+len(r.text):]...), at
}
