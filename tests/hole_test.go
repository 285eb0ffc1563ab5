package tests

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestWorkerThatAnswersAtOnce has one of four engines answer at once, without any work. It
// must get no more than 1.3 times its share of the requests.
func TestWorkerThatAnswersAtOnce(t *testing.T) {
	takesSeconds(t)
	const event = "data: {\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"canned\",\"choices\":[{\"index\":0,\"delta\":{%s},\"finish_reason\":%s}]}\n\n"
	token, end := fmt.Sprintf(event, `"role":"assistant","content":"no"`, "null"), fmt.Sprintf(event, "", `"stop"`)+"data: [DONE]\n\n"
	for name, answer := range map[string]func(http.ResponseWriter){
		"400": func(w http.ResponseWriter) {
			http.Error(w, `{"error":{"message":"no such template"}}`, http.StatusBadRequest)
		},
		"empty": func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, end)
		},
		"one token": func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, token+end)
		},
	} {
		for _, clients := range []int{16, 200} {
			if clients > 16 && name != "400" {
				continue
			}
			t.Run(fmt.Sprintf("%s, %d clients", name, clients), func(t *testing.T) {
				var dials []string
				for range 4 {
					e, err := engine.Start(engine.Config{AnswerTokens: 40})
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(e.Close)
					dials = append(dials, e.Addr())
				}
				var hole, all atomic.Int64
				well := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: dials[0]})
				broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.Method == http.MethodGet {
						well.ServeHTTP(w, r)
						return
					}
					_, _ = io.Copy(io.Discard, r.Body)
					hole.Add(1)
					answer(w)
				}))
				t.Cleanup(broken.Close)
				dials[0] = broken.Listener.Addr().String()
				s := startCaddy(t, "kv_router "+strings.Join(dials, " "))
				ctx, stop := context.WithTimeout(t.Context(), 6*time.Second)
				defer stop()
				var wg sync.WaitGroup
				for i := range clients {
					wg.Go(func() {
						rng := rand.New(rand.NewPCG(3, uint64(i))) //nolint:gosec // not a secret
						for ctx.Err() == nil {
							c := ask(prose(rng, 2000, 12000)).streamed()
							c.Model = "sim-8b"
							s.chat(t.Context(), c)
							all.Add(1)
						}
					})
				}
				time.Sleep(2 * time.Second) // until times are learned
				hole.Store(0)
				all.Store(0)
				wg.Wait()
				share := float64(hole.Load()) / float64(all.Load())
				t.Logf("%d of %d requests: %.0f %%", hole.Load(), all.Load(), 100*share)
				var w struct {
					Health struct {
						Ratio float64 `json:"error_ratio"`
						Apart bool    `json:"errors_apart"`
					} `json:"health"`
				}
				s.api(t, http.MethodGet, defaultPool+"/workers/"+dials[0], nil, &w)
				if odd := name != "one token"; w.Health.Apart != odd || (w.Health.Ratio > 0.9) != odd {
					t.Errorf("the admin API says %+v", w.Health)
				}
				if share > 1.3/4 {
					t.Errorf("the engine that answers at once got %.0f %% of %d requests", 100*share, all.Load())
				}
			})
		}
	}
}
