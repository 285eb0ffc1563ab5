package response

import (
	"bufio"
	"compress/gzip"
	"errors"
	"io"
	"iter"
	"net/http"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// Replayed is an answer's body whose beginning was read already.
type Replayed struct {
	io.ReadCloser
	Begin []byte
	Err   error // that came with it
}

func (r *Replayed) Read(p []byte) (int, error) {
	if len(r.Begin) > 0 {
		n := copy(p, r.Begin)
		if r.Begin = r.Begin[n:]; len(r.Begin) > 0 {
			return n, nil
		}
		return n, r.Err
	}
	if r.Err != nil {
		return 0, r.Err
	}
	return r.ReadCloser.Read(p)
}

// Watch shows the beginning of an answer, at most so many bytes, before the client gets the rest of it.
func Watch(resp *http.Response, most int, show func(begin []byte)) {
	resp.Body = &watched{ReadCloser: resp.Body, left: resp.ContentLength, most: most, show: show}
}

type watched struct {
	io.ReadCloser
	begin []byte
	left  int64 // negative if unknown
	most  int
	show  func([]byte) // nil once it was called
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.ReadCloser.Read(p)
	if w.show == nil {
		return n, err
	}
	w.begin = append(w.begin, p[:min(n, w.most-len(w.begin))]...)
	if w.left -= int64(n); err != nil || w.left == 0 || len(w.begin) == w.most {
		w.show(w.begin)
		w.begin, w.show = nil, nil
	}
	return n, err
}

// Unpack decompresses a gzip answer. The router asks engines not to compress what it reads,
// but some do so anyway, or a proxy before them does. The client may not know gzip.
func Unpack(resp *http.Response) {
	if resp.Body == http.NoBody || !strings.EqualFold(strings.TrimSpace(resp.Header.Get("Content-Encoding")), "gzip") {
		return
	}
	resp.Body = &unpacked{ReadCloser: resp.Body}
	resp.Header.Del("Content-Encoding")
	resp.Header.Del("Content-Length")
	resp.ContentLength, resp.Uncompressed = -1, true
}

// unpacked is a decompressed body. What the engine has flushed can be read at once.
type unpacked struct {
	io.ReadCloser // as the engine sends it
	plain         io.Reader
	err           error
}

func (u *unpacked) Read(p []byte) (int, error) {
	if u.plain == nil && u.err == nil { // reading gzip's header waits for the answer
		in := bufio.NewReader(u.ReadCloser)
		magic, err := in.Peek(2)
		switch {
		case len(magic) == 2 && magic[0] == 0x1f && magic[1] == 0x8b:
			u.plain, u.err = gzip.NewReader(in)
		case len(magic) > 0 || errors.Is(err, io.EOF):
			u.plain = in // the label is wrong
		default:
			u.err = err
		}
	}
	if u.err != nil {
		return 0, u.err
	}
	return u.plain.Read(p)
}

// maxMerged is the longest list of models that MergeModels changes, in bytes.
const maxMerged = 1 << 20

// MergeModels adds the models that only others serve, each with its id and its JSON, to a
// worker's list. Public names replace the models that they stand for. It returns false if the list is compressed
// or too long.
func MergeModels(resp *http.Response, others iter.Seq2[string, string], public iter.Seq2[string, []string]) bool {
	if resp.StatusCode != http.StatusOK {
		return true
	}
	if body.Compressed(resp.Header) {
		return false
	}
	list, err := io.ReadAll(io.LimitReader(resp.Body, maxMerged+1))
	rest := &Replayed{ReadCloser: resp.Body, Begin: list, Err: err}
	resp.Body = rest
	if err != nil {
		return true
	}
	if len(list) > maxMerged {
		return false
	}
	if merged := withModels(list, others, public); merged != nil {
		rest.Begin, rest.Err = merged, io.EOF
		resize(resp, int64(len(merged)))
	}
	return true
}

// withModels returns a list of models with others added. Public names replace the models that they stand for. The
// other bytes stay. It returns nil if nothing changes, or the body is no list.
func withModels(list []byte, others iter.Seq2[string, string], public iter.Seq2[string, []string]) []byte {
	data := gjson.GetBytes(list, "data")
	if !gjson.ValidBytes(list) || !data.IsArray() || data.Index == 0 {
		return nil
	}
	hidden := make(map[string]bool)
	for name, models := range public {
		hidden[name] = true
		for _, model := range models {
			hidden[model] = true
		}
	}
	known := make(map[string]string) // the JSON of each model by its id
	var added []byte
	e, more := rawjson.EditAt(list, data.Index, len(list)), false
	e.Drop(func(_ string, v rawjson.Span) bool {
		id := v.Get(list, "id").Text(list)
		known[id], more = string(v.Of(list)), more || !hidden[id]
		return hidden[id]
	})
	add := func(raw string) {
		if more {
			added = append(added, ',')
		}
		added, more = append(added, raw...), true
	}
	for id, raw := range others {
		if known[id] != "" {
			continue
		}
		if known[id] = raw; !hidden[id] {
			add(raw)
		}
	}
	for name, models := range public {
		if i := slices.IndexFunc(models, func(model string) bool { return known[model] != "" }); i >= 0 {
			raw := []byte(known[models[i]])
			id := rawjson.Edit{Span: api.NameIn(raw, "id"), Text: rawjson.AppendString(nil, name)}
			add(string(rawjson.Splice(nil, raw, []rawjson.Edit{id})))
		}
	}
	if end := data.Index + len(data.Raw) - 1; len(added) > 0 {
		e.Replace(rawjson.Edit{Span: rawjson.Span{Start: end, End: end}, Text: added})
	}
	if edits := e.Edits(); len(edits) > 0 {
		return rawjson.Splice(nil, list, edits)
	}
	return nil
}
