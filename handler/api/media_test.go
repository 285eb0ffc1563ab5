package api

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"image"
	"image/gif"
	"image/jpeg"
	"image/png"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

func encode(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

func pictures(t testing.TB, w, h int) map[string]string {
	t.Helper()
	img := image.NewGray(image.Rect(0, 0, w, h))
	var p, j, g bytes.Buffer
	for _, err := range []error{png.Encode(&p, img), jpeg.Encode(&j, img, nil), gif.Encode(&g, img, nil)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	// a thumbnail's segment before the frame, as cameras write it
	exif := append([]byte{0xFF, 0xD8, 0xFF, 0xE1, 0x60, 0x02}, bytes.Repeat([]byte{0xFF, 0xC0}, 0x3000)...)
	webp := func(chunk string, at int, size ...byte) string {
		b := make([]byte, 40)
		copy(b, "RIFF....WEBP"+chunk)
		copy(b[at:], size)
		return encode(b)
	}
	le := binary.LittleEndian
	v8 := le.AppendUint16(le.AppendUint16(nil, uint16(w)|0x4000), uint16(h))
	v8l := le.AppendUint32(nil, uint32(w-1)|uint32(h-1)<<14)
	v8x := append(le.AppendUint32(nil, uint32(w-1))[:3], le.AppendUint32(nil, uint32(h-1))[:3]...)
	return map[string]string{
		"png": encode(p.Bytes()), "jpeg": encode(j.Bytes()), "gif": encode(g.Bytes()),
		"exif": encode(append(append(exif, 0xFF), j.Bytes()[2:]...)),
		"webp": webp("VP8 ", 26, v8...), "webp lossless": webp("VP8L", 21, v8l...), "webp extended": webp("VP8X", 24, v8x...),
	}
}

func TestImageTokens(t *testing.T) {
	for _, c := range []struct {
		w, h int
		want int64
	}{{560, 560, 400}, {1001, 333, 1001 * 333 / 784}, {20, 20, 64}} {
		for name, data := range pictures(t, c.w, c.h) {
			for _, body := range []string{
				`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/x;base64,` + data + `"}}]}]}`,
				`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image\/x;base64,` + strings.ReplaceAll(data, "/", `\/`) + `"}}]}]}`,
			} {
				// of a body with escapes only the beginning is looked at
				if r := mustParse(t, chat{}, body); r.Media != 1 || r.MediaTokens != c.want && !(name == "exif" && strings.Contains(body, `\/`)) {
					t.Errorf("%s of %d by %d: %d tokens, want %d", name, c.w, c.h, r.MediaTokens, c.want)
				}
			}
		}
	}
}

func TestMediaTokens(t *testing.T) {
	wav := make([]byte, 44+10*32000)
	copy(wav, "RIFF....WAVEfmt ")
	binary.LittleEndian.PutUint32(wav[28:], 32000)
	huge := make([]byte, 40)
	copy(huge, "\x89PNG")
	binary.BigEndian.PutUint64(huge[16:], 1<<63-1)
	for part, want := range map[string]int64{
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + encode(huge) + `"}}`:                                16384,
		`{"type":"image_url","image_url":{"url":"https://a/b.png"}}`:                                                           1024,
		`{"type":"image_url","image_url":{"url":"https://a/b.png","detail":"low"}}`:                                            85,
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}`:                                                1024,
		`{"type":"input_audio","input_audio":{"format":"wav","data":"` + encode(wav) + `"}}`:                                   250,
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
	data := pictures(t, 60, 60)["png"]
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
	a := mustParse(t, generate{}, `{"text":"<image> what is it?","image_data":["`+data+`","https://a/b.png"],"audio_data":null}`)
	b := mustParse(t, generate{}, `{"text":"<image> what is it?","image_data":["data:image/png;base64,`+data+`",{"url":"https://a/b.png"}]}`)
	c := mustParse(t, generate{}, `{"text":"<image> what is it?","image_data":"https://a/c.png"}`)
	if a.Media != 2 || a.MediaTokens != 64+1024 || a.Blocks[0] != b.Blocks[0] || b.Media != 2 || c.Blocks[0] == a.Blocks[0] {
		t.Errorf("%+v\n%+v\n%+v", a, b, c)
	}
}

func FuzzMedia(f *testing.F) {
	for _, p := range pictures(f, 30, 30) {
		f.Add([]byte(p))
	}
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
