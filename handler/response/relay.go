package response

import (
	"bufio"
	"compress/gzip"
	"errors"
	"io"
	"iter"
	"maps"
	"net/http"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/tidwall/gjson"
)

// Forward copies an answer's header but for what concerns one connection only
// (RFC 9110, 7.6.1).
func Forward(to, from http.Header) {
	maps.Copy(to, from)
	for _, names := range from["Connection"] {
		for name := range strings.SplitSeq(names, ",") {
			to.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range []string{
		"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade",
	} {
		to.Del(name)
	}
}

// Replayed is an answer's body of which a part was read already.
type Replayed struct {
	io.ReadCloser
	Held []byte
	Err  error // that came with it
}

func (r *Replayed) Read(p []byte) (int, error) {
	if len(r.Held) > 0 {
		n := copy(p, r.Held)
		r.Held = r.Held[n:]
		return n, nil
	}
	if r.Err != nil {
		return 0, r.Err
	}
	return r.ReadCloser.Read(p)
}

// Unpack takes the gzip off an answer. The router asks engines not to compress
// what it reads. Some do so regardless, or a proxy before them does: then a
// client that does not know gzip could not read the answer, nor could the router.
func Unpack(resp *http.Response) {
	if resp.Body == http.NoBody || !strings.EqualFold(strings.TrimSpace(resp.Header.Get("Content-Encoding")), "gzip") {
		return
	}
	resp.Body = &unpacked{ReadCloser: resp.Body}
	resp.Header.Del("Content-Encoding")
	resp.Header.Del("Content-Length")
	resp.ContentLength, resp.Uncompressed = -1, true
}

// unpacked is an answer's body without its gzip. What the engine has flushed can
// be read at once.
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

// maxMerged is the longest list of models that others are added to, in bytes.
const maxMerged = 1 << 20

// MergeModels adds to a worker's list of models those that only others serve, each with
// its id and its JSON. It returns false if the list is compressed or too long.
func MergeModels(resp *http.Response, others iter.Seq2[string, string]) bool {
	if resp.StatusCode != http.StatusOK {
		return true
	}
	if body.Compressed(resp.Header) { // although it was asked not to be
		return false
	}
	list, err := io.ReadAll(io.LimitReader(resp.Body, maxMerged+1))
	rest := &Replayed{ReadCloser: resp.Body, Held: list, Err: err}
	resp.Body = rest
	if err != nil {
		return true
	}
	if len(list) > maxMerged {
		return false
	}
	if merged := withModels(list, others); merged != nil {
		rest.Held, rest.Err = merged, io.EOF
		resp.ContentLength = int64(len(merged))
		resp.Header.Set("Content-Length", strconv.Itoa(len(merged)))
		resp.Header.Del("Etag")
	}
	return true
}

// withModels returns a list of models with others in it; the bytes that were there
// stay. It returns nil if nothing is to be added, or the body is no list.
func withModels(list []byte, others iter.Seq2[string, string]) []byte {
	data := gjson.GetBytes(list, "data")
	if !gjson.ValidBytes(list) || !data.IsArray() || data.Index == 0 {
		return nil
	}
	known := make(map[string]bool)
	data.ForEach(func(_, entry gjson.Result) bool {
		known[entry.Get("id").Str] = true
		return true
	})
	empty := len(known) == 0
	var b strings.Builder
	for id, raw := range others {
		if known[id] {
			continue
		}
		known[id] = true
		if !empty {
			b.WriteByte(',')
		}
		empty = false
		b.WriteString(raw)
	}
	if b.Len() == 0 {
		return nil
	}
	end := data.Index + len(data.Raw) - 1
	return []byte(string(list[:end]) + b.String() + string(list[end:]))
}
