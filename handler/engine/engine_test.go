package engine

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// site is a server by its paths: bodies of answers with status 200, or `!401`.
type site map[string]string

func (s site) get(asked *[]string) Get {
	return func(path string) (int, []byte) {
		*asked = append(*asked, path)
		switch body, ok := s[path]; {
		case s["*"] == "down", s["*"] == "silent" && !ok:
			return 0, nil
		case body == "!401":
			return 401, []byte(`{"error":"Unauthorized"}`)
		case !ok:
			return 404, []byte(`{"detail":"Not Found"}`)
		default:
			return 200, []byte(body)
		}
	}
}

// capture is a server in testdata/servers.txt.
type capture struct {
	name, facts string // the facts as shown
	site        site
}

// captures reads testdata/servers.txt.
func captures(t testing.TB) (all []capture) {
	t.Helper()
	data, err := os.ReadFile("testdata/servers.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range strings.Split(string(data), "\n\n# ")[1:] {
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		s, path := capture{lines[0], strings.TrimSpace(strings.TrimPrefix(lines[1], "=")), make(site)}, ""
		for _, line := range lines[2:] {
			if rest, of := strings.CutPrefix(line, "\t"); of { // of a body of several lines
				s.site[path] += rest + "\n"
				continue
			}
			var body string
			path, body, _ = strings.Cut(line, " ")
			s.site[path] = body
		}
		all = append(all, s)
	}
	return all
}

// shown returns the members of an info that say something.
func shown(i Info) string {
	var all []string
	v := reflect.ValueOf(i)
	for n := range v.NumField() {
		value := v.Field(n).Interface()
		if at, is := value.(time.Time); is {
			value = at.UnixMilli()
		}
		if !v.Field(n).IsZero() {
			all = append(all, fmt.Sprintf("%s:%+v", v.Type().Field(n).Name, value))
		}
	}
	return strings.Join(all, " ")
}

func TestAskFindsOut(t *testing.T) {
	for _, c := range captures(t) {
		t.Run(c.name, func(t *testing.T) {
			var asked []string
			is, _, _ := strings.Cut(strings.TrimPrefix(c.facts, "Type:"), " ")
			if got := shown(Ask(c.site.get(&asked))); got != c.facts {
				t.Errorf("got %s\nwant %s", got, c.facts)
			}
			if slices.Sort(asked); len(slices.Compact(asked)) != len(asked) {
				t.Errorf("asked twice: %v", asked)
			}
			if is == TRTLLM && slices.Contains(asked, pathMetrics) {
				t.Errorf("its statistics were taken away: %v", asked)
			}
			if is != Dynamo && slices.Contains(asked, "/health") {
				t.Errorf("asked for its health, which may cost requests: %v", asked)
			}
			if c.site["*"] == "down" && len(asked) > 1 {
				t.Errorf("asked %v of a server that is down", asked)
			}
			for _, kind := range Names {
				asked = nil
				again := AskAs(kind, c.site.get(&asked))
				switch silent := c.site["*"] != ""; {
				case silent && again != Info{}, again.Type != is && again.Type != "":
					t.Errorf("asked as %s it reports %+v", kind, again)
				case kind == is && kind != Other && !silent && shown(again) != c.facts:
					t.Errorf("asked as %s it reports %+v\nwant %s", kind, again, c.facts)
				case is == TRTLLM && kind != VLLM && slices.Contains(asked, pathMetrics):
					t.Errorf("asked as %s: its statistics were taken away", kind)
				}
			}
		})
	}
}

// TestTakesRankIn checks in which APIs an engine takes the rank, and that it then gets it.
func TestTakesRankIn(t *testing.T) {
	all := []string{
		api.NameChat, api.NameCompletions, api.NameResponses, api.NameMessages, api.NameGenerate, api.NameTokens, api.NameEmbeddings,
		api.NameRerank, api.NameScore, api.NameClassify, api.NamePooling, Invocations, "",
	}
	chosen := []string{api.NameResponses, api.NameEmbeddings, api.NameRerank, api.NameScore, api.NameClassify, api.NamePooling}
	for _, c := range []struct {
		kind, version string
		ignored       []string
	}{
		{VLLM, "0.8.5", all},
		{VLLM, "0.10.2.dev3+gabc", all},
		{VLLM, "0.11.0", append([]string{api.NameTokens}, chosen...)},
		{VLLM, "0.31.1.dev7+gabc", append([]string{api.NameTokens}, chosen...)},
		{VLLM, "0.32.0", chosen},
		{VLLM, "1.0", chosen},
		{VLLM, "", chosen},
		{VLLM, "dev", chosen},
		{SGLang, "0.5.10", nil},
		{SGLang, "", nil},
		{TRTLLM, "1.4.0", all},
		{LlamaCpp, "b6000", all},
		{Dynamo, "", all},
		{Other, "", nil},
	} {
		e := Engine{Type: c.kind, Info: Info{Version: c.version}}
		for _, name := range all {
			want := !slices.Contains(c.ignored, name)
			if got := e.TakesRankIn(name); got != want {
				t.Errorf("%s %s, %q: %v, want %v", c.kind, c.version, name, got, want)
			}
			sent := e.Adapt(&Request{API: name, Ext: &nvext.Ext{Tenant: "t"}, Rank: 1, Ranks: 2}) // the body was not read
			if got := slices.Contains(sent.Headers, Header{Name: HeaderRank, Value: "1"}); got != want {
				t.Errorf("%s %s, %q: has the header: %v, want %v", c.kind, c.version, name, got, want)
			}
			if c.kind != Dynamo && !slices.Equal(slices.Collect(sent.Unsupported.Names), []string{"cache_salt"}) {
				t.Errorf("%s, %q: cannot use %b", c.kind, name, sent.Unsupported)
			}
		}
	}
}

// TestFailingServerReportsNothing has a server of a known type answer with errors. What it
// reported before stays.
func TestFailingServerReportsNothing(t *testing.T) {
	for path, want := range map[string]string{pathVersion: "", pathMetrics: "", "/other": VLLM} {
		got := AskAs(VLLM, func(asked string) (int, []byte) {
			if asked == path {
				return 503, nil
			}
			return 200, []byte(`{"data":[{"id":"m","owned_by":"vllm"}]}`)
		})
		if got.Type != want {
			t.Errorf("%s fails: the server shows to be %q, want %q", path, got.Type, want)
		}
	}
}

// checkInfo fails for values that are out of bounds.
func checkInfo(t *testing.T, info Info) {
	t.Helper()
	switch {
	case info.Type != "" && !Known(info.Type), len(info.Version) > maxVersion, len(info.BootID) > maxVersion,
		info.KVTokens < 0 || info.KVTokens > maxCount*maxBlockSize, info.BlockSize < 0 || info.BlockSize > maxBlockSize,
		info.DPSize < 0 || info.DPSize > maxRanks, info.ContextTokens < 0 || info.ContextTokens > maxCount,
		info.MaxRunning < 0 || info.MaxRunning > maxCount:
		t.Errorf("info %+v", info)
	}
}

// FuzzAsk has a server that gives one answer at all paths.
func FuzzAsk(f *testing.F) {
	vllm := uint8(slices.Index(Names, VLLM)) //nolint:gosec // there are few
	for _, c := range captures(f) {
		for _, body := range c.site {
			f.Add([]byte(body), uint8(0))
			f.Add([]byte(body), vllm)
		}
	}
	f.Add([]byte("vllm:cache_config_info{engine=\"\\\",block_size=\"} 1\nprocess_start_time_seconds NaN\n"), vllm)
	f.Add([]byte("process_start_time_seconds{ 1e300"), vllm)
	f.Add([]byte(`{"page_size":1e400,"dp_size":-1,"version":{"version":"\u0000"},"max_total_num_tokens":"9"}`), uint8(1))
	f.Fuzz(func(t *testing.T, body []byte, as uint8) {
		get := func(string) (int, []byte) { return 200, body }
		checkInfo(t, Ask(get))
		checkInfo(t, AskAs(Names[int(as)%len(Names)], get))
	})
}
