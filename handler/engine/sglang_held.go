package engine

import (
	"errors"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// sglangHeld are SGLang's streaming sessions. The answer to an open is the session's id
// as a JSON string, or null. All errors have status 400. A close is answered with 200
// as soon as it is received, for an unknown session, too
// (python/sglang/srt/entrypoints/http_server.py).
//
// Each rank opens each session, and keeps what its own turns computed: a turn on another
// rank begins anew. /generate heeds session_params. Chat and completions have the member
// and drop it (openai/serving_chat.py, openai/serving_completions.py), except in builds
// that forward it.
var sglangHeld = sessions{
	apis: []string{api.NameGenerate}, further: []string{api.NameChat, api.NameCompletions},
	open: openSGLang, opened: openedSGLang, close: closeSGLang,
	closed: func(status int) bool { return status/100 == 2 || status == 400 || status == 404 },
}

// sglangCapacity is the capacity of a session. SGLang requires the member, and does not
// limit streaming sessions by it.
const sglangCapacity = 1 << 16

func openSGLang(id string, timeout time.Duration) SessionCall {
	var o rawjson.Object
	o.Open()
	o.Uint("capacity_of_str_len", sglangCapacity)
	o.Text(nameSession, id)
	o.Raw("streaming", []byte("true"))
	o.Float("timeout", timeout.Seconds())
	o.Close()
	return SessionCall{"/" + OpenSession, o.Buf}
}

func openedSGLang(status int, answer []byte) error {
	if status == 200 {
		if id := gjson.ParseBytes(answer); gjson.ValidBytes(answer) && id.Type == gjson.String && id.Str != "" {
			return nil
		}
		return errors.New("the engine opened no session: its answer is no session id")
	}
	// SGLang's own words for a session that is open already, and Dynamo's
	if said := messageOf(answer); status == 400 && (strings.Contains(said, "same id is still open") || strings.Contains(said, "already exist")) {
		return nil
	}
	return refused(status, answer)
}

func closeSGLang(id string) SessionCall {
	var o rawjson.Object
	o.Open()
	o.Text(nameSession, id)
	o.Close()
	return SessionCall{"/" + CloseSession, o.Buf}
}
