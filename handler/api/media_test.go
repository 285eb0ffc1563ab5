package api

import (
	"encoding/base64"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

func encode(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

func TestMediaTokens(t *testing.T) {
	for part, want := range map[string]int64{
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + encode(make([]byte, 120_000)) + `"}}`:               600,
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + encode(make([]byte, 8_000_000)) + `"}}`:             16384,
		`{"type":"image_url","image_url":{"url":"https://a/b.png"}}`:                                                           1024,
		`{"type":"image_url","image_url":{"url":"https://a/b.png","detail":"low"}}`:                                            85,
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}`:                                                64,
		`{"type":"input_audio","input_audio":{"format":"mp3","data":"` + encode(make([]byte, 160_000)) + `"}}`:                 250,
		`{"type":"audio_url","audio_url":{"url":"https://a/b"}}`:                                                               1024,
		`{"type":"video_url","video_url":{"url":"data:video/mp4;base64,` + encode(make([]byte, 500_000)) + `"}}`:               526,
		`{"type":"file","file":{"file_data":"data:application/pdf;base64,` + encode(make([]byte, 4000)) + `","filename":"x"}}`: 1000,
		`{"type":"file","file":{"file_data":"` + encode(make([]byte, 400_000)) + `"}}`:                                         16384,
		`{"type":"file","file":{"file_id":"f"}}`:                                                                               1024,
		`{"type":"odd","x":"` + strings.Repeat("x", 100) + `"}`:                                                                30,
	} {
		if r := mustParse(t, chat{}, `{"messages":[{"role":"user","content":[`+part+`]}]}`); r.Media != 1 || r.MediaTokens != want {
			t.Errorf("%.80s: %d parts, %d tokens, want %d", part, r.Media, r.MediaTokens, want)
		}
	}
}

func TestMediaThroughAllAPIs(t *testing.T) {
	data := encode([]byte("\x89PNG >?>?>?")) // with slashes in base64
	chatWith := func(part string) string {
		return `{"messages":[{"role":"user","content":[{"type":"text","text":"look:"},` + part + `]}]}`
	}
	same(t, map[string]API{
		chatWith(`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + data + `"}}`):                                                              chat{},
		chatWith(`{"type":"image_url","image_url":{"url":"data:image\/png;base64,` + strings.ReplaceAll(data, "/", `\/`) + `","detail":"high"}}`):              chat{},
		chatWith(`{"cache_control":{"type":"ephemeral"},"type":"image","source":{"type":"base64","media_type":"image/png","data":"` + data + `"}}`):            messages{},
		`{"input":[{"role":"user","content":[{"type":"input_text","text":"look:"},{"type":"input_image","image_url":"data:image/png;base64,` + data + `"}]}]}`: responses{},
	})
	same(t, map[string]API{
		chatWith(`{"type":"image_url","image_url":{"url":"https://a/b.png"}}`):                                                                 chat{},
		chatWith(`{"type":"image","source":{"type":"url","url":"https://a/b.png"}}`):                                                           messages{},
		`{"input":[{"role":"user","content":[{"type":"input_text","text":"look:"},{"type":"input_image","image_url":"https:\/\/a\/b.png"}]}]}`: responses{},
	})
	same(t, map[string]API{
		chatWith(`{"type":"file","file":{"file_data":"data:application/pdf;base64,AAAABBBBCCCC","filename":"a"}}`):                                                  chat{},
		chatWith(`{"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"AAAABBBBCCCC"},"title":"b"}`):                                 messages{},
		`{"input":[{"role":"user","content":[{"type":"input_text","text":"look:"},{"type":"input_file","file_data":"data:application/pdf;base64,AAAABBBBCCCC"}]}]}`: responses{},
	})
	same(t, map[string]API{ // a tool's images are the user's
		`{"messages":[{"role":"tool","content":"see"},{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://a/b.png"}}]}]}`:                                       chat{},
		`{"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":"see"},{"type":"image","source":{"type":"url","url":"https://a/b.png"}}]}]}]}`: messages{},
	})
}

func FuzzMedia(f *testing.F) {
	f.Add([]byte(`UklGRg\/`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		for class := mediaOther; class <= mediaFile; class++ {
			m := medium{class: class}
			m.set(raw, mediaData)
			if n := m.tokens(rawjson.Span{End: len(raw)}); n < 0 || n > maxMedia {
				t.Fatalf("%d tokens", n)
			}
		}
	})
}
