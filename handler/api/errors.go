package api

import (
	"cmp"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// Codes of the router's own errors. They are stable.
const (
	CodeNVExt        = "invalid_nvext"
	CodePin          = "invalid_pin"
	CodeSessionKey   = "invalid_session_key"
	CodeSessionOpen  = "session_not_opened"
	CodeSessionBusy  = "session_busy"
	CodeSessionLost  = "session_lost"
	CodeTooLarge     = "body_too_large"
	CodeUnreadable   = "body_unreadable"
	CodeNoModel      = "model_not_found"
	CodeShared       = "cache_salt_unsupported"
	CodeNoWorker     = "no_worker"
	CodeFailed       = "worker_failed"
	CodeTimeout      = "worker_timeout"
	CodeQueueFull    = "queue_full"
	CodeQueueTimeout = "queue_timeout"
	CodeLate         = "ttft_unattainable"
	CodeLimit        = "rate_limit_exceeded" // as OpenAI's
)

// Refusal is an error of the router's own, with which it answers a request.
type Refusal struct { //nolint:errname // the field's word
	API        API // of the request; nil if it is for no known API
	Status     int
	Code       string
	Param      string // the member or header at fault; empty if there is none
	Err        error
	RetryAfter int // seconds after which the client may try again; 0 if unknown
}

// Error implements error.
func (r *Refusal) Error() string { return r.Err.Error() }

func (r *Refusal) Unwrap() error { return r.Err }

// Body returns the body of the answer, see [ErrorBody].
func (r *Refusal) Body() []byte { return ErrorBody(r.API, r.Status, r.Code, r.Error(), r.Param) }

// shape is the form of errors that an API's clients expect.
type shape uint8

const (
	shapeOpenAI shape = iota
	shapeResponses
	shapeAnthropic
	shapeSGLang
)

func shapeOf(a API) shape {
	if a == nil {
		return shapeOpenAI
	}
	return a.traits().shape
}

// ErrorBody returns the body of one of the router's own errors, in the shape that
// the API's clients expect. OpenAI's is {"error":{"message","type","param","code"}}.
// Anthropic's is {"type":"error","error":{"type","message","code","param"}}.
// SGLang's for /generate is {"error":{"message",...}}. As on the API's own servers,
// the type follows from the status. Programs may test the stable code; message is
// for people. param names the member or header at fault, and is null if it is empty.
// A nil API gives OpenAI's shape.
func ErrorBody(a API, status int, code, message, param string) []byte {
	anthropic := shapeOf(a) == shapeAnthropic
	var w rawjson.Object
	w.Open()
	if anthropic {
		w.Text("type", "error")
	}
	w.Name("error")
	w.Open()
	w.Text("message", message)
	w.Text("type", errorType(status, anthropic))
	if param == "" {
		w.Raw("param", []byte("null"))
	} else {
		w.Text("param", param)
	}
	w.Text("code", code)
	w.Close()
	w.Close()
	return w.Buf
}

// errorType follows OpenAI's servers, or the table in Anthropic's documentation of
// errors. That table lacks 503, which here has the type of its 529.
func errorType(status int, anthropic bool) string {
	switch {
	case status == 401:
		return "authentication_error"
	case status == 403:
		return "permission_error"
	case status == 429:
		return "rate_limit_error"
	case !anthropic && status >= 500:
		return "server_error"
	case !anthropic:
	case status == 404:
		return "not_found_error"
	case status == 413:
		return "request_too_large"
	case status == 503 || status == 529:
		return "overloaded_error"
	case status == 504:
		return "timeout_error"
	case status >= 500:
		return "api_error"
	}
	return "invalid_request_error"
}

// maxErrorText is the longest error of an engine without JSON that a client gets in an event, in bytes.
const maxErrorText = 1000

// ErrorEvent returns an answer with an error status as an event, in the shape that the API's clients
// expect. It is for streams whose header the client has. The event has the answer's own error, or its text.
func ErrorEvent(a API, status int, answer []byte) string {
	var e gjson.Result
	if gjson.ValidBytes(answer) {
		all := gjson.ParseBytes(answer)
		if e = all.Get("error"); !e.IsObject() && all.Get("message").Type == gjson.String {
			e = all // as older engines have it
		}
	}
	if !e.IsObject() {
		text := string(answer[:min(len(answer), maxErrorText)])
		return ErrorEvent(a, status, ErrorBody(a, status, strconv.Itoa(status), cmp.Or(strings.TrimSpace(text), "no answer"), ""))
	}
	part := func(path string) []byte { return []byte(cmp.Or(e.Get(path).Raw, "null")) }
	var w rawjson.Object
	shape := shapeOf(a)
	if w.Buf = []byte("data: "); shape == shapeResponses || shape == shapeAnthropic {
		w.Buf = []byte("event: error\ndata: ")
	}
	w.Open()
	if shape == shapeResponses || shape == shapeAnthropic {
		w.Text("type", "error")
	}
	if shape == shapeResponses {
		// OpenAI's reference has flat members, its servers and libraries an
		// object. The number is required, but unknown here.
		w.Raw("code", part("code"))
		w.Raw("message", part("message"))
		w.Raw("param", part("param"))
		w.Raw("sequence_number", []byte{'0'})
	}
	w.Raw("error", part("@ugly")) // on one line
	w.Close()
	return string(w.Buf) + "\n\n"
}

// BrokenEvent returns the last event of a stream that the engine broke off. It is
// an error with the code stream_broken, in the shape that the API's clients expect.
// The caller then aborts the connection. A nil API gives OpenAI's shape.
func BrokenEvent(a API) string {
	return ErrorEvent(a, 500, ErrorBody(a, 500, "stream_broken", "the engine's answer broke off", ""))
}
