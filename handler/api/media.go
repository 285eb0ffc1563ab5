package api

import (
	"bytes"
	"encoding/binary"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

type mediaClass uint8

const (
	mediaOther mediaClass = iota
	mediaImage
	mediaVideo
	mediaAudio
	mediaFile
)

type mediaForm uint8

const (
	mediaNone mediaForm = iota // unknown
	mediaID                    // the id of a file on the server
	mediaData                  // base64
	mediaURL
)

// medium is a part that is not text.
type medium struct {
	class mediaClass
	form  mediaForm
	raw   []byte // as it stands between its quotes; of a data URL the base64
	low   bool   // an image for low detail
}

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

// read reads the content from an object, and from the objects in it that the type
// names. Of several members the last counts. Chat has
// {"type":"image_url","image_url":{"url"}}, also with a string instead of the inner
// object. Responses has {"type":"input_image","image_url"}, and Messages
// {"type":"image","source":{"data"}}.
func (m *medium) read(b []byte, v rawjson.Span, kind []byte) {
	for key, v := range v.Members(b) {
		form := mediaURL
		switch string(key) {
		case "url", "image_url", "file_url", "video_url", "audio_url", "source", "file":
		case "data", "input_audio", "file_data":
			form = mediaData
		case "file_id":
			form = mediaID
		case "detail":
			raw, _ := v.Str(b)
			m.low = m.low || string(raw) == "low"
			continue
		default:
			if len(kind) == 0 || string(key) != string(kind) {
				continue
			}
		}
		if v.First(b) == '{' && len(kind) > 0 {
			m.read(b, v, nil)
		} else if raw, ok := v.Str(b); ok && len(raw) > 0 {
			m.set(raw, form)
		}
	}
}

// set records the content. A data URL is the same as its data alone.
func (m *medium) set(raw []byte, form mediaForm) {
	m.raw, m.form = raw, form
	if !bytes.HasPrefix(raw, []byte("data:")) {
		return
	}
	const head = 256 // the media type and its parameters
	mark := []byte(";base64,")
	if i := bytes.Index(raw[:min(len(raw), head)], mark); i >= 0 {
		m.raw, m.form = raw[i+len(mark):], mediaData
	}
}

// digest hashes a part by its content: hints beside it and the API do not matter.
// The same base64 has one digest as a data URL and as Anthropic's source. A part of
// unknown form counts as it is written.
func (m *medium) digest(b []byte, v rawjson.Span, seed uint64) [16]byte {
	var d digest
	var head [10]byte
	binary.LittleEndian.PutUint64(head[:], seed)
	head[8], head[9] = byte(m.class), byte(m.form)
	d.add(head[:])
	if m.form != mediaNone {
		d.addString(m.raw)
	} else {
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
	// unknownMedia is for a part of unknown size: a URL, a file's id.
	unknownMedia = 1024
	// lowDetail is OpenAI's count for an image with "detail":"low".
	lowDetail = 85
)

// bytesPerToken are rules of thumb. Qwen2-VL and its successors have a token for 28 by
// 28 pixels, which are 100 to 400 bytes. Qwen2-Audio has one for 40 ms, here at 128
// kbit/s. Gemini has 263 for a second of video, here at 2 Mbit/s.
var bytesPerToken = [...]int64{mediaOther: 4, mediaImage: 200, mediaVideo: 950, mediaAudio: 640, mediaFile: 4}

// tokens estimates the part's tokens in the prompt by its length in bytes. v is the
// whole part, whose length counts if its form is unknown.
func (m *medium) tokens(v rawjson.Span) int64 {
	n := int64(len(m.raw)) * 3 / 4 / bytesPerToken[m.class]
	switch {
	case m.class == mediaImage && m.low:
		return lowDetail
	case m.form == mediaNone:
		n = int64(v.Len()) / bytesPerToken[mediaOther]
	case m.form != mediaData:
		return unknownMedia
	case m.class == mediaImage:
		n = max(n, minImage)
	}
	return min(n, maxMedia)
}
