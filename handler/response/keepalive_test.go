package response

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

const (
	comment = ": keepalive\n\n"
	event   = "data: {}\n\n"
)

// TestKeepalive has handlers write to clients whose streams are kept alive at 15 s.
func TestKeepalive(t *testing.T) {
	ofStream := map[string]string{"Content-Type": "text/event-stream", "X-Engine": "e1"}
	answer := func(k *Keepalive, status int, header map[string]string) {
		for name, value := range header {
			k.Header().Set(name, value)
		}
		k.WriteHeader(status)
	}
	for _, v := range []struct {
		name   string
		late   bool          // there is no early header
		seat   time.Duration // when there is a worker
		do     func(*Keepalive)
		status int // 200 if 0
		own    bool
		want   string
	}{
		{name: "quick answer", do: func(k *Keepalive) {
			time.Sleep(11 * time.Second)
			answer(k, 200, ofStream)
			for range 3 {
				io.WriteString(k, event)
				time.Sleep(11 * time.Second)
			}
		}, want: event + event + event},
		{name: "long wait", own: true, do: func(k *Keepalive) {
			time.Sleep(46 * time.Second)
			answer(k, 200, ofStream)
			io.WriteString(k, event)
		}, want: comment + comment + comment + event},
		{name: "long wait without an early header", late: true, do: func(k *Keepalive) {
			time.Sleep(40 * time.Second)
			answer(k, 200, ofStream)
			time.Sleep(16 * time.Second)
			io.WriteString(k, event)
		}, want: comment + event},
		{name: "pauses", do: func(k *Keepalive) {
			answer(k, 200, ofStream)
			time.Sleep(31 * time.Second)
			io.WriteString(k, event)
			time.Sleep(16 * time.Second)
			io.WriteString(k, "data: {")
			time.Sleep(time.Minute) // within an event
			io.WriteString(k, "}\r\n\r\n")
			time.Sleep(16 * time.Second)
		}, want: comment + comment + event + comment + "data: {}\r\n\r\n: keepalive\r\n\r\n"},
		{name: "ends that are split", do: func(k *Keepalive) {
			answer(k, 200, ofStream)
			for _, part := range []string{"data: {}\n", "\n", "", "wait", "data: {}\r\n\r", "\n", "wait", "data: x", "\r", "\n", "\r", "\n", "wait"} {
				if part == "wait" {
					time.Sleep(16 * time.Second)
				} else {
					io.WriteString(k, part)
				}
			}
		}, want: event + comment + "data: {}\r\n\r\n: keepalive\r\n\r\ndata: x\r\n\r\n: keepalive\r\n\r\n"},
		{name: "long wait for a seat", own: true, seat: time.Minute, do: func(k *Keepalive) {
			time.Sleep(70 * time.Second)
			answer(k, 200, ofStream)
		}, want: comment},
		{name: "too long a wait for a seat", seat: time.Minute, do: func(k *Keepalive) {
			time.Sleep(59 * time.Second)
			answer(k, 200, ofStream)
		}},
		{name: "refusal at once", status: 400, do: func(k *Keepalive) {
			answer(k, 400, map[string]string{"Content-Type": "application/json"})
			time.Sleep(time.Minute)
			io.WriteString(k, `{"error":{}}`)
		}, want: `{"error":{}}`},
		{name: "refusal after the early header", own: true, do: func(k *Keepalive) {
			time.Sleep(16 * time.Second)
			answer(k, 400, map[string]string{"Content-Type": "application/json"})
			io.WriteString(k, "{\"error\":\n")
			io.WriteString(k, `{"message":"no"}}`)
		}, want: comment + `data: {"error":{"message":"no"}}` + "\n\n"},
		{name: "an answer that is compressed or no stream after the early header", own: true, do: func(k *Keepalive) {
			time.Sleep(16 * time.Second)
			answer(k, 200, map[string]string{"Content-Type": "text/event-stream", "Content-Encoding": "br"})
			for range 3 {
				k.Write(make([]byte, maxErrorBody))
			}
		}, want: comment + api.ErrorEvent(nil, 502, make([]byte, 1000))},
		{name: "compressed", do: func(k *Keepalive) {
			answer(k, 200, map[string]string{"Content-Type": "text/event-stream", "Content-Encoding": "br"})
			time.Sleep(time.Minute)
		}},
		{name: "of a known length", do: func(k *Keepalive) {
			answer(k, 200, map[string]string{"Content-Type": "text/event-stream", "Content-Length": "10"})
			time.Sleep(time.Minute)
			io.WriteString(k, event)
		}, want: event},
		{name: "the end is certain", do: func(k *Keepalive) {
			if k.Late() {
				t.Error("it says that it is late")
			}
			time.Sleep(time.Minute)
			k.WriteHeader(503)
		}, status: 503},
	} {
		t.Run(v.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := httptest.NewRecorder()
				client.Header().Set("X-Before", "1")
				early := http.Header{"Content-Type": {"text/event-stream"}, "X-Early": {"1"}}
				if v.late {
					early = nil
				}
				begun := time.Now()
				k := Keep(client, nil, 15*time.Second, early, func() bool { return time.Since(begun) >= v.seat })
				v.do(k)
				k.Close()
				got := client.Body.String()
				time.Sleep(time.Hour)
				status := v.status
				if status == 0 {
					status = 200
				}
				if got != v.want || client.Body.String() != got || client.Code != status {
					t.Errorf("the client got %d, %q, want %q", client.Code, got, v.want)
				}
				h := client.Result().Header
				if own := h.Get("X-Early") != ""; own != v.own || own && h.Get("X-Engine") != "" || h.Get("X-Before") == "" || v.status == 0 && h.Get("Content-Type") != "text/event-stream" {
					t.Errorf("the client got the header %v", h)
				}
			})
		})
	}
}

// TestKeepaliveBesideAnAnswer has comments sent while an answer is written. The race detector checks
// what they share.
func TestKeepaliveBesideAnAnswer(t *testing.T) {
	for wait := range 10 {
		client := httptest.NewRecorder()
		k := Keep(client, nil, 2*time.Millisecond, http.Header{"Content-Type": {"text/event-stream"}}, func() bool { return true })
		k.Header().Set("Content-Type", "text/event-stream")
		time.Sleep(time.Duration(wait) * 400 * time.Microsecond)
		k.Header().Set("X-Engine", "e1")
		k.WriteHeader(200)
		for range 200 {
			io.WriteString(k, event)
			k.FlushError()
			time.Sleep(20 * time.Microsecond)
		}
		k.Header().Set("X-Trailer", "1")
		k.Close()
		if got := strings.ReplaceAll(client.Body.String(), comment, ""); got != strings.Repeat(event, 200) {
			t.Fatalf("the client got %q", got)
		}
	}
}
