package plan

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// identified returns the plan of a body.
func identified(t *testing.T, path, body string, ratios *kvscore.Ratios) *Plan {
	t.Helper()
	opts := api.Options{TextBlock: 64, BlockSize: 16}
	req, err := api.Parse(api.For(path), []byte(body), opts)
	if err != nil {
		t.Fatal(err)
	}
	p := &Plan{Request: req}
	p.identify(opts, ratios, nil)
	return p
}

// TestImagesLeaveTextAlone has one system prompt of 800 tokens, which an engine has
// cached, and another image of 1,500 tokens in nearly each request.
func TestImagesLeaveTextAlone(t *testing.T) {
	system := strings.Repeat("you are a careful inspector of parts, say what you see. ", 57)
	for name, hasImage := range map[string]func(i int) bool{
		"at first none": func(i int) bool { return i > 3 && i%12 != 0 },
		"all":           func(int) bool { return true },
	} {
		t.Run(name, func(t *testing.T) {
			s, targets := kvscore.NewScheduler(kvscore.Settings{}), []kvscore.Target{{Worker: 1}}
			s.Declare(targets[0], 0)
			var ratios kvscore.Ratios
			var sel kvscore.Selection
			for i := range 24 {
				image, tokens := "", int64(820)
				if hasImage(i) {
					image, tokens = fmt.Sprintf(`,{"type":"image_url","image_url":{"url":"http://images/%d.png"}}`, i), 2320
				}
				p := identified(t, "/v1/chat/completions", fmt.Sprintf(
					`{"messages":[{"role":"system","content":%q},{"role":"user","content":[{"type":"text","text":"part %d"}%s]}]}`, system, i, image), &ratios)
				_, l := s.Select(time.Now(), &p.Score, targets, 0, nil, &sel)
				if off := sel.Candidates[0].OverlapTokens - 800; i > 1 && (off < -16 || off > 16) {
					t.Errorf("request %d: %d tokens predicted, 800 are cached", i, sel.Candidates[0].OverlapTokens)
				}
				cached := int64(800)
				if i == 0 {
					cached = 0
				}
				l.Counted(kvscore.Counts{Prompt: tokens, Cached: cached})
				l.End(true, nil)
			}
		})
	}
}

// TestGivenIDsReplaceTheText replaces the text of a plan by token ids, as queries do.
func TestGivenIDsReplaceTheText(t *testing.T) {
	var ratios kvscore.Ratios
	p := identified(t, "/v1/completions", `{"prompt":"`+strings.Repeat("hello world, this is it. ", 200)+`"}`, &ratios)
	ids := "[" + strings.Repeat("1234,5678,91011,17,", 400)
	if p = testReader(0).WithTokens(p, []byte(ids[:len(ids)-1]+"]")); p == nil {
		t.Fatal("the ids are refused")
	}
	s, target := kvscore.NewScheduler(kvscore.Settings{}), kvscore.Target{Worker: 1}
	s.Declare(target, 0)
	var sel kvscore.Selection
	s.Explain(time.Now(), &p.Score, []kvscore.Target{target}, 0, &kvscore.LeastLoad{}, &sel)
	if sel.Tokens != 1600 || sel.RequestBlocks != 100 {
		t.Errorf("1600 ids are measured as %d tokens in %v blocks", sel.Tokens, sel.RequestBlocks)
	}
}
