package api

import (
	"encoding/base64"
	"strings"
	"testing"
)

func encode(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

func TestMediaTokens(t *testing.T) {
	url := func(kind, media string, size int) string {
		return `{"type":"` + kind + `","` + kind + `":{"url":"data:` + media + `;base64,` + encode(make([]byte, size)) + `"}}`
	}
	for part, want := range map[string]int64{
		url("image_url", "image/png", 120_000):                       600,
		url("image_url", "image/png", 8_000_000):                     16384,
		url("image_url", "image/png", 1000):                          64,
		url("video_url", "video/mp4", 500_000):                       526,
		url("audio_url", "audio/mp3", 160_000):                       250,
		url("file", "application/pdf", 400_000):                      16384,
		`{"type":"image_url","image_url":{"url":"https://a/b.png"}}`: 1024,
		`{"type":"file","file":{"file_id":"f"}}`:                     1024,
		`{"type":"odd","x":"` + strings.Repeat("x", 100) + `"}`:      30,
	} {
		if r := mustParse(t, chat{}, `{"messages":[{"role":"user","content":[`+part+`]}]}`); r.Media != 1 || r.MediaTokens != want {
			t.Errorf("%.80s: %d parts, %d tokens, want %d", part, r.Media, r.MediaTokens, want)
		}
	}
}

// A part is the same wherever it stands, and another one is not.
func TestMedia(t *testing.T) {
	chatWith := func(part string) string {
		return `{"messages":[{"role":"user","content":[{"type":"text","text":"look:"},` + part + `]}]}`
	}
	same(t, map[string]API{
		chatWith(`{"type":"image","source":{"data":"AAAA"}}`):                                       messages{},
		chatWith(`{"type":"image","source":{"data":"AAAA"},"cache_control":{}}`):                    messages{},
		chatWith(`{"type":"image", "source":{"data": "AAAA"}}`):                                     chat{},
		`{"input":[{"role":"user","content":["look:",{"type":"image","source":{"data":"AAAA"}}]}]}`: responses{},
	})
	a := mustParse(t, generate{}, `{"text":"<image> what is it?","image_data":["AAAA","https://a/b.png"],"audio_data":null}`)
	b := mustParse(t, generate{}, `{"image_data":[["AAAA"],["https://a/b.png"]],"text":"<image> what is it?"}`)
	c := mustParse(t, generate{}, `{"text":"<image> what is it?","image_data":["AAAB","https://a/b.png"]}`)
	if a.Media != 2 || a.MediaTokens != 2*1024 || a.Blocks[0] != b.Blocks[0] || b.Media != 2 || c.Blocks[0] == a.Blocks[0] {
		t.Errorf("%+v\n%+v\n%+v", a, b, c)
	}
}
