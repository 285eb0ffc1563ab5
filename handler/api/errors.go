package api

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// shape is how an API's clients expect errors.
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
	return a.shape()
}

// ErrorBody returns the body of an error of our own, in the shape that the
// API's clients expect: OpenAI's {"error":{"message","type","param","code"}},
// Anthropic's {"type":"error","error":{"type","message","code","param"}}, or
// SGLang's {"error":{"message",...}} for its /generate. The type follows from
// the status, as the API's own servers have it. Code is stable and for
// programs to test, message for people; param names the member or header at
// fault, and is null if it is empty. A nil API gives OpenAI's shape.
func ErrorBody(a API, status int, code, message, param string) []byte {
	kind := openAIType(status)
	var w rawjson.Object
	w.Open()
	if shapeOf(a) == shapeAnthropic {
		kind = anthropicType(status)
		w.Text("type", "error")
	}
	w.Name("error")
	w.Open()
	w.Text("message", message)
	w.Text("type", kind)
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

func openAIType(status int) string {
	switch {
	case status == 401:
		return "authentication_error"
	case status == 403:
		return "permission_error"
	case status == 429:
		return "rate_limit_error"
	case status >= 500:
		return "server_error"
	}
	return "invalid_request_error"
}

// anthropicType is the table of Anthropic's documentation of errors; a 503,
// which is not in it, says the same as its 529.
func anthropicType(status int) string {
	switch status {
	case 401:
		return "authentication_error"
	case 403:
		return "permission_error"
	case 404:
		return "not_found_error"
	case 413:
		return "request_too_large"
	case 429:
		return "rate_limit_error"
	case 503, 529:
		return "overloaded_error"
	case 504:
		return "timeout_error"
	}
	if status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

// The object of a broken stream's last event; the type is Anthropic's word
// there.
const (
	brokenText  = `"message":"the engine's answer broke off"`
	brokenError = `{` + brokenText + `,"type":"server_error","param":null,"code":"stream_broken"}`
)

const (
	brokenOpenAI    = "data: " + `{"error":` + brokenError + "}\n\n"
	brokenResponses = "event: error\ndata: " +
		// OpenAI's reference has the members flat, its servers send, and its
		// libraries look for, the object. The number is required, and nobody
		// can tell the right one.
		`{"type":"error","code":"stream_broken",` + brokenText + `,"param":null,"sequence_number":0,"error":` + brokenError + "}\n\n"
	brokenAnthropic = "event: error\ndata: " +
		`{"type":"error","error":{"type":"api_error",` + brokenText + `,"code":"stream_broken"}}` + "\n\n"
)

// BrokenEvent returns what ends a stream that broke off on the engine's side:
// one event with an error of the code stream_broken, in the shape that the
// API's clients expect, never the mark of a complete answer. before are the
// last bytes that the client got, four of them or more: an event that was cut
// is ended first, and only such a one, for there are clients that fail at an
// empty line too many. The caller aborts the connection behind it. A nil API
// gives OpenAI's shape.
func BrokenEvent(a API, before []byte) []byte {
	event := brokenOpenAI
	switch shapeOf(a) {
	case shapeResponses:
		event = brokenResponses
	case shapeAnthropic:
		event = brokenAnthropic
	case shapeOpenAI, shapeSGLang: // whose own errors are {"error":{"message"}}, too
	}
	return []byte(eventEnd(before) + event)
}

// eventEnd returns what ends the event that the bytes are the last of, nothing
// if it has ended.
func eventEnd(before []byte) string {
	line, ended := cutLineBreak(before)
	if _, blank := cutLineBreak(line); len(before) == 0 || ended && (blank || len(line) == 0) {
		return ""
	}
	if ended && before[len(before)-1] == '\n' {
		return "\n"
	}
	return "\n\n" // behind a CR the first may be taken for its other half
}

// cutLineBreak returns b without the line break at its end, if there is one.
func cutLineBreak(b []byte) ([]byte, bool) {
	for _, s := range []string{"\r\n", "\n", "\r"} {
		if rest, ok := bytes.CutSuffix(b, []byte(s)); ok {
			return rest, true
		}
	}
	return b, false
}
