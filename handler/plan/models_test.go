package plan

import (
	"fmt"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// TestSidesOfAModel has sessions keep their side, whichever router chooses it.
func TestSidesOfAModel(t *testing.T) {
	weight := func(n uint32) *uint32 { return &n }
	m := &PublicModel{Name: "m", To: []EngineModel{{"a", weight(9)}, {"none", weight(0)}, {Model: "b"}}}
	all := func(string) bool { return true }
	seen := map[string]int{}
	for key := range uint64(10_000) {
		seen[m.choose(key, all)]++
		if got := m.choose(key, func(model string) bool { return model == "none" }); got != "none" {
			t.Fatalf("%s serves nothing", got)
		}
		if got := m.choose(key, func(string) bool { return false }); got != "a" && got != m.choose(key, all) {
			t.Fatalf("without any, it is %s", got)
		}
	}
	if seen["none"] > 0 || seen["b"] < 880 || seen["b"] > 1120 {
		t.Errorf("of 10,000 sessions: %v", seen)
	}
	if got := m.choose(12, all) + m.choose(13, all) + m.choose(14, all) + m.choose(15, all) + m.choose(16, all) + m.choose(17, all); got != sidesBefore {
		t.Errorf("sides have changed: %s", got)
	}
}

const sidesBefore = "aabaaa"

// TestConversationsOpenTheSame has turns of one conversation have one opening, and others another.
func TestConversationsOpenTheSame(t *testing.T) {
	const first = `{"messages":[{"role":"user","content":"hi\n"}]}`
	same := []string{
		`{"messages":[{"role":"system","content":"now it is 3"},{"content":[{"type":"text","text":"hi\u000a","cache_control":{}}],"role":"user"},{"role":"assistant","content":"x"}]}`,
		`{"stream":true,"input":[{"role":"developer","content":"x"},{"role":"user","content":"hi\n"},{"role":"user","content":"y"}]}`,
		`{"input":"hi\n"}`, `{"prompt":["hi\n"]}`,
	}
	for _, body := range same {
		if api.Opening([]byte(body)) != api.Opening([]byte(first)) {
			t.Errorf("%s opens in another way", body)
		}
	}
	seen := map[uint64]string{}
	for _, body := range []string{
		first, `{"messages":[{"role":"user","content":"ho"}]}`, `{"messages":[]}`, `{"prompt":[1,2]}`, `{"prompt":[1,3]}`, `{"input":"x"}`, `no JSON`, "", `{"messages":`,
		fmt.Sprintf(`{"input":%q}`, strings.Repeat("a", 1000)), fmt.Sprintf(`{"input":%q}`, strings.Repeat("a", 1001)),
	} {
		sum := api.Opening([]byte(body))
		if other, has := seen[sum]; has {
			t.Errorf("%.40s opens as %.40s", body, other)
		}
		seen[sum] = body
	}
}

// FuzzModelInForm finds the model in forms of any bytes. It never finds another text.
func FuzzModelInForm(f *testing.F) {
	f.Add("multipart/form-data; boundary=b", "--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\nm\r\n--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n", "m")
	f.Fuzz(func(t *testing.T, kind, form, name string) {
		at := modelInForm(kind, []byte(form), name)
		if got := at.Of([]byte(form)); at.Len() > 0 && string(got) != name {
			t.Errorf("found %q", got)
		}
		_ = NameInPath(form, name).Of([]byte(form))
	})
}
