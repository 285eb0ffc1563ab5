package api

import (
	"bytes"
	"encoding/binary"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// mediaClass is the kind of content of a part that is not text.
type mediaClass uint8

const (
	mediaOther mediaClass = iota
	mediaImage
	mediaVideo
	mediaAudio
	mediaFile
)

// classOf returns the class that the type of a part, or the name of a member, has.
func classOf(name []byte) mediaClass {
	switch {
	case bytes.Contains(name, []byte("image")):
		return mediaImage
	case bytes.Contains(name, []byte("video")):
		return mediaVideo
	case bytes.Contains(name, []byte("audio")):
		return mediaAudio
	case bytes.Contains(name, []byte("file")), bytes.Contains(name, []byte("document")):
		return mediaFile
	}
	return mediaOther
}

// digest hashes a part by its members.
func (m mediaClass) digest(b []byte, v rawjson.Span, seed uint64) [16]byte {
	var d digest
	var head [9]byte
	binary.LittleEndian.PutUint64(head[:], seed)
	head[8] = byte(m)
	d.add(head[:])
	if v.First(b) != '{' {
		d.addJSON(v.Of(b))
		return d.sum()
	}
	c := rawjson.Enter(b, v.Start)
	for c.Next() {
		key := c.Key()
		v := c.Value()
		if string(key) == "cache_control" { // clients move it from turn to turn
			continue
		}
		d.add(key)
		d.add([]byte{markSep})
		d.addJSON(v.Of(b))
	}
	return d.sum()
}

const (
	// minImage and maxMedia bound an image's and any part's tokens, about as Qwen-VL's
	// processors resize images by default.
	minImage, maxMedia = 64, 16384
	// maxMediaTokens bounds all parts of a request: a client must not make a
	// worker look overloaded with URLs.
	maxMediaTokens = 128 << 10
	// unknownMedia is for a part of unknown size: a URL or a file's id, in a part of
	// at most maxReference bytes.
	unknownMedia, maxReference = 1024, 1024
)

// bytesPerToken are rules of thumb. Qwen2-VL and its successors have a token for 28 by
// 28 pixels, which are 100 to 400 bytes. Qwen2-Audio has one for 40 ms, here at 128
// kbit/s. Gemini has 263 for a second of video, here at 2 Mbit/s.
var bytesPerToken = [...]int64{mediaImage: 200, mediaVideo: 950, mediaAudio: 640, mediaFile: 4}

// tokens estimates a part's tokens in the prompt by its size bytes of JSON, most of
// which are base64.
func (m mediaClass) tokens(size int) int64 {
	n := int64(size)
	switch {
	case m == mediaOther:
		return min(n/4, maxMedia)
	case size <= maxReference:
		return unknownMedia
	}
	n = n * 3 / 4 / bytesPerToken[m]
	if m == mediaImage {
		n = max(n, minImage)
	}
	return min(n, maxMedia)
}
