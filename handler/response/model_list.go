package response

import (
	"io"
	"iter"
	"net/http"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/tidwall/gjson"
)

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
