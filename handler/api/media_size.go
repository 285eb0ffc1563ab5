package api

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Estimates of a part's tokens, by rules of thumb of the models that engines serve.
const (
	// pixelsPerToken is a patch of 28 by 28 pixels, one token for Qwen2-VL and
	// its successors. Anthropic's rule is close: width x height / 750.
	pixelsPerToken = 28 * 28
	// minImage and maxMedia bound a part, about as Qwen-VL's processors resize
	// images by default.
	minImage, maxMedia = 64, 16384
	// maxMediaTokens bounds all parts of a request: a client must not make a
	// worker look overloaded with URLs.
	maxMediaTokens = 128 << 10
	// unknownMedia is for a part of unknown size: a URL, a file's id.
	unknownMedia = 1024
	// lowDetail is OpenAI's count for an image with "detail":"low".
	lowDetail = 85
	// audioPerSecond is Qwen2-Audio's: one token for 40 ms.
	audioPerSecond = 25
	// audioBytes is one second of compressed audio at 128 kbit/s, in bytes.
	audioBytes = 16_000
	// videoPerSecond is Gemini's count at one frame a second.
	videoPerSecond = 263
	// videoBytes is one second of compressed video at 2 Mbit/s, in bytes.
	videoBytes = 250_000
	// fileBytes is how many bytes of a file make a token.
	fileBytes = 4
)

// tokens estimates the part's tokens in the prompt. v is the whole part, whose
// length counts if its form is unknown.
func (m *medium) tokens(v rawjson.Span) int64 {
	size := int64(len(m.raw)) * 3 / 4
	switch {
	case m.class == mediaImage && m.low:
		return lowDetail
	case m.form == mediaNone:
		return min(int64(v.End-v.Start)/fileBytes, maxMedia)
	case m.form != mediaData:
		return unknownMedia
	case m.class == mediaImage:
		if w, h := pixels(m.raw); w > 0 && h > 0 {
			return min(max(w*h/pixelsPerToken, minImage), maxMedia)
		}
		return unknownMedia
	case m.class == mediaAudio:
		return min(size*audioPerSecond/byteRate(m.raw), maxMedia)
	case m.class == mediaVideo:
		return min(size*videoPerSecond/videoBytes, maxMedia)
	}
	return min(size/fileBytes, maxMedia)
}

// base64Text reads single bytes of base64 without decoding all of it.
type base64Text []byte

// textOf returns the base64 of a JSON string, given between its quotes. Some clients
// escape its slashes (\/): then it returns a copy of the beginning.
func textOf(raw []byte) base64Text {
	const head = 4096
	if bytes.IndexByte(raw[:min(len(raw), 2*head)], '\\') < 0 {
		return raw
	}
	out := make([]byte, 0, head)
	r := rawjson.Runs{Raw: raw[:min(len(raw), 2*head)]}
	for p := r.Next(); p != nil && len(out)+len(p) <= head; p = r.Next() {
		out = append(out, p...)
	}
	return out
}

// at decodes the bytes at an offset into dst, at most 30. It returns false if some
// are missing.
func (t base64Text) at(offset int, dst []byte) bool {
	var buf [36]byte
	skip := offset % 3
	start := offset / 3 * 4
	end := start + (skip+len(dst)+2)/3*4
	if offset < 0 || end > len(t) {
		return false
	}
	n, err := base64.StdEncoding.Decode(buf[:], t[start:end])
	return err == nil && n >= skip+len(dst) && copy(dst, buf[skip:n]) == len(dst)
}

// pixels returns an image's size from its header; zeros if it is not known.
func pixels(raw []byte) (w, h int64) {
	const most = 1 << 20 // keeps a product from overflowing
	t := textOf(raw)
	var b [30]byte
	if !t.at(0, b[:]) {
		return 0, 0
	}
	switch {
	case string(b[:4]) == "\x89PNG":
		w, h = int64(binary.BigEndian.Uint32(b[16:])), int64(binary.BigEndian.Uint32(b[20:]))
	case string(b[:4]) == "GIF8":
		w, h = int64(binary.LittleEndian.Uint16(b[6:])), int64(binary.LittleEndian.Uint16(b[8:]))
	case string(b[:4]) == "RIFF" && string(b[8:12]) == "WEBP":
		w, h = webpSize(b[:])
	case b[0] == 0xFF && b[1] == 0xD8:
		w, h = jpegSize(t)
	}
	return min(w, most), min(h, most)
}

// webpSize reads the three kinds of a WebP's first chunk (RFC 9649, 2.5 to 2.7).
func webpSize(b []byte) (w, h int64) {
	switch string(b[12:16]) {
	case "VP8 ":
		return int64(binary.LittleEndian.Uint16(b[26:]) & 0x3FFF), int64(binary.LittleEndian.Uint16(b[28:]) & 0x3FFF)
	case "VP8L":
		v := binary.LittleEndian.Uint32(b[21:])
		return int64(v&0x3FFF) + 1, int64(v>>14&0x3FFF) + 1
	case "VP8X":
		return int64(binary.LittleEndian.Uint32(b[23:])>>8) + 1, int64(binary.LittleEndian.Uint32(b[26:])>>8) + 1
	}
	return 0, 0
}

// jpegSize walks the segments before the frame header (ITU T.81, B.1 and B.2.2).
func jpegSize(t base64Text) (w, h int64) {
	const segments = 64
	var b [9]byte
	at := 2
	for range segments {
		if !t.at(at, b[:]) || b[0] != 0xFF {
			return 0, 0
		}
		switch m := b[1]; {
		case m == 0xFF: // fill
			at++
		case m >= 0xC0 && m <= 0xCF && m != 0xC4 && m != 0xC8 && m != 0xCC:
			return int64(binary.BigEndian.Uint16(b[7:])), int64(binary.BigEndian.Uint16(b[5:]))
		case m == 0x01 || m >= 0xD0 && m <= 0xD9:
			at += 2
		default:
			at += 2 + int(binary.BigEndian.Uint16(b[2:]))
		}
	}
	return 0, 0
}

// byteRate returns the bytes of a second of audio: from a WAV's header, or the usual
// rate of compressed audio.
func byteRate(raw []byte) int64 {
	t := textOf(raw)
	var b [16]byte
	var rate [4]byte
	if t.at(0, b[:]) && string(b[:4]) == "RIFF" && string(b[8:]) == "WAVEfmt " && t.at(28, rate[:]) {
		if n := binary.LittleEndian.Uint32(rate[:]); n > 0 {
			return int64(n)
		}
	}
	return audioBytes
}
