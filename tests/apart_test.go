package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestBadWorkersAreFound has a slow, a failing and a cold engine among eight. It looks for them as the
// manual says: by the command and on the page.
func TestBadWorkersAreFound(t *testing.T) {
	takesSeconds(t)
	s, addrs, bad := serveBadly(t)
	checkStatus(t, s, bad)
	checkPage(t, s, addrs, bad)
}

// serveBadly has eight engines serve conversations until the test ends. Three of them are bad.
func serveBadly(t *testing.T) (s *server, addrs []string, bad signsOf) {
	t.Helper()
	engines := make([]*engine.Engine, 8)
	for i := range engines {
		e, err := engine.Start(engine.Config{Name: fmt.Sprintf("e%d", i+1), Speed: 2, AnswerTokens: 16, NoPrefixCache: i == 6})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		engines[i], addrs = e, append(addrs, e.Addr())
	}
	s = startCaddy(t, "kv_router_status /status\nkv_router "+strings.Join(addrs, " "))
	setFault(t, engines[2], engine.Fault{Kind: engine.Slow, Factor: 5})
	ctx := t.Context()
	var all sync.WaitGroup
	t.Cleanup(all.Wait)
	all.Go(func() { // half of the requests fail
		for n := 0; ctx.Err() == nil; n++ {
			f := engine.Fault{}
			if n%20 < 10 {
				f = engine.Fault{Kind: engine.Status, Status: 500}
			}
			engines[4].SetFault(f) //nolint:errcheck // it is valid
			time.Sleep(10 * time.Millisecond)
		}
	})
	for i := range 60 {
		all.Go(func() { talkOn(ctx, s, rand.New(rand.NewPCG(7, uint64(i)))) })
	}
	return s, addrs, signsOf{addrs[2]: "slow", addrs[4]: "failing", addrs[6]: "cold"}
}

// checkStatus waits until the command shows the bad workers.
func checkStatus(t *testing.T, s *server, bad signsOf) {
	t.Helper()
	row := regexp.MustCompile(`(?m)^(127\.0\.0\.1:\d+) +([^:\n]*?) +sim-8b`)
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Second) {
		signs := make(signsOf)
		code, out := kvRouter(t, "status", "--address", s.admin)
		for _, m := range row.FindAllStringSubmatch(out, -1) {
			signs.add(m[1], m[2])
		}
		found := maps.Equal(signs, bad) && code == 2
		if !found && time.Now().Before(deadline) {
			continue
		}
		if t.Logf("caddy kv-router status:\n%s", out); !found {
			t.Fatalf("status: code %d, shows %v, want %v", code, signs, bad)
		}
		return
	}
}

// checkPage waits until the page shows the bad workers, if there is a Chromium.
func checkPage(t *testing.T, s *server, addrs []string, bad signsOf) {
	t.Helper()
	signs := make(signsOf)
	for deadline := time.Now().Add(patience); !maps.Equal(signs, bad); { // the signs are of the last minutes, and change
		dom := shown(t, s.url+"/status")
		if dom == "" {
			return
		}
		clear(signs)
		for _, addr := range addrs {
			signs.add(addr, regexp.MustCompile(`(?s)`+regexp.QuoteMeta(addr)+`</th>.*?</tr>`).FindString(dom))
		}
		if t.Logf("the page: %v", signs); time.Now().After(deadline) && !maps.Equal(signs, bad) {
			t.Fatalf("the page shows %v, want %v", signs, bad)
		}
	}
}

// signsOf are the signs of workers, by address.
type signsOf map[string]string

// add adds the signs that a text names.
func (s signsOf) add(addr, text string) {
	for _, sign := range []string{"slow", "failing", "cold"} {
		if strings.Contains(text, sign) {
			s[addr] += sign
		}
	}
}

// talkOn talks with one conversation after the other. Each has a long beginning, and a few turns.
func talkOn(ctx context.Context, s *server, rnd *rand.Rand) {
	for ctx.Err() == nil {
		c := chat{Model: "sim-8b", Stream: true, MaxTokens: 16, StreamOptions: json.RawMessage(`{"include_usage":true}`)}
		c.Messages = []message{{"user", prose(rnd, 6000, 6000)}}
		for turn := 0; turn < 5 && ctx.Err() == nil; turn++ {
			a := s.chat(ctx, c)
			if !a.ok() { // try again
				time.Sleep(50 * time.Millisecond)
				continue
			}
			c.Messages = append(c.Messages, message{"assistant", a.text}, message{"user", prose(rnd, 300, 300)})
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// shown returns what Chromium makes of a page, and nothing if there is no Chromium.
func shown(t testing.TB, address string) string {
	t.Helper()
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		return ""
	}
	out, err := exec.CommandContext(t.Context(), chromium, "--headless=new", "--no-sandbox", "--disable-gpu", //nolint:gosec // found above
		"--user-data-dir="+t.TempDir(), "--virtual-time-budget=2500", "--dump-dom", address).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
