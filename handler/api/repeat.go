package api

import "bytes"

// repeat remembers what surrounds the text in the last chunk that had nothing but
// text. Most chunks of a stream differ from the one before in that text alone.
type repeat struct {
	begin, end []byte // of that chunk, around its text; nil if there is none
	off        bool   // it does not pay

	learned, used int

	// of the chunk being read
	chunk bool   // it has the form that can be remembered
	texts int    // pieces of text in it
	text  []byte // the last of them
	chat  bool   // it was read as a message's
}

const (
	// maxRepeat bounds what is remembered of a chunk, in bytes.
	maxRepeat = 4096
	// fewRepeats is the number of chunks after which repeat may turn itself off.
	fewRepeats = 8
)

// outcome is what a chunk may change besides the text.
type outcome struct {
	finished                                   int
	done, failed, steady                       bool
	prompt, completion, cached, fresh, created int64
	ids                                        int64
	calls                                      callState
	args                                       int
}

func (a *Answer) outcome() outcome {
	return outcome{
		a.finished, a.done, a.failed, a.steady,
		a.prompt, a.completion, a.cached, a.fresh, a.created, a.ids.count, a.calls, len(a.args),
	}
}

// again reads a chunk if it repeats the one before, and returns whether it does.
func (a *Answer) again(data []byte) bool {
	r := &a.repeat
	if r.begin == nil || len(data) < len(r.begin)+len(r.end) ||
		!bytes.HasPrefix(data, r.begin) || !bytes.HasSuffix(data, r.end) {
		return false
	}
	raw := data[len(r.begin) : len(data)-len(r.end)]
	if len(raw) == 0 {
		return false
	}
	for _, c := range raw {
		if c == '"' || c == '\\' {
			return false // the text may end elsewhere
		}
	}
	r.used++
	if r.chat {
		a.chatText(raw)
	} else {
		a.text(raw)
	}
	return true
}

// remember keeps what surrounds the text of a chunk that had nothing else.
func (a *Answer) remember(data []byte, before outcome) {
	r := &a.repeat
	r.begin = nil
	if !r.chunk || r.texts != 1 || len(r.text) == 0 || before != a.outcome() {
		return
	}
	at := cap(data) - cap(r.text)
	end := at + len(r.text)
	if at < 1 || end >= len(data) || data[at-1] != '"' || data[end] != '"' || len(data)-len(r.text) > maxRepeat {
		return
	}
	if r.learned++; r.learned > fewRepeats && r.used < r.learned {
		r.off = true
		return
	}
	around := append(make([]byte, 0, len(data)-len(r.text)), data[:at]...)
	around = append(around, data[end:]...)
	r.begin, r.end = around[:at:at], around[at:]
}
