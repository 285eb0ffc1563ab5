package api

import (
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// StatusAborted is the status of an answer that its engine aborted, mostly because somebody asked
// it to. Servers log it for requests that a client gave up.
const StatusAborted = 499

// fault records an error object at b[i]: it has a member error that is not null, or is SGLang's
// "object":"error".
func (a *Answer) fault(b []byte, i int, v, object rawjson.Span) {
	if v.End > 0 && !v.IsNull(b) || string(object.Of(b)) == `"error"` {
		a.fail(errorStatus(b[i:]))
	}
}

// fail records that the answer is an error, or that an error ends its stream. status is 0 if the
// error names no cause: SGLang's /generate has such errors for what is wrong with a request.
func (a *Answer) fail(status int) {
	switch {
	case status != 0:
	case a.req.API.traits().shape == shapeSGLang:
		status = 400
	default:
		status = 500
	}
	a.blame(status)
	a.done = true
}

// blame records why the answer failed. The first error counts.
func (a *Answer) blame(status int) {
	if a.failed == 0 {
		a.failed = status
	}
}

// errorStatus returns the status that an error stands for. b begins with an object that is the error
// or has it, or is a text. The status is the error's number, 400 if its code or type names a fault of
// the request, and StatusAborted if the engine aborted that. Other causes are 500, and no cause is 0.
func errorStatus(b []byte) int {
	var e errorCause
	if v := rawjson.Document(b); v.First(b) == '{' {
		e.read(b, v, 0)
	} else {
		e.text(b)
	}
	return e.status()
}

type errorCause struct {
	number  int
	clients bool // it is the request
	aborted bool
	named   bool // it has a number, a code or a type
}

func (e *errorCause) status() int {
	switch {
	case e.aborted && !e.clients && (e.number == 0 || e.number >= 500):
		return StatusAborted
	case e.number > 0:
		return e.number
	case e.clients:
		return 400
	case e.named:
		return 500
	}
	return 0
}

const maxWithinError = 3

func (e *errorCause) read(b []byte, v rawjson.Span, depth int) {
	if raw, ok := v.Str(b); ok {
		e.text(raw)
	}
	var within [2]rawjson.Span
	for key, v := range v.Members(b) {
		switch string(key) {
		case "error":
			within[0] = v
		case "response":
			within[1] = v
		case "message", "detail":
			raw, _ := v.Str(b)
			e.text(raw)
		case "code", "status", "status_code", "type", "error_type", "err_type":
			if n := statusNumber(v.Of(b)); n > 0 {
				e.number, e.named = n, true
			} else if raw, ok := v.Str(b); ok {
				e.name(raw)
			}
		}
	}
	for _, v := range within { // the innermost number counts
		if depth < maxWithinError && v.End > 0 {
			e.read(b, v, depth+1)
		}
	}
}

// statusNumber returns the status of an error, 0 if the value is none. It may be in quotes, with
// its text behind it.
func statusNumber(v []byte) int {
	s := strings.TrimPrefix(rawjson.View(v), `"`)
	digits := len(s) - len(strings.TrimLeft(s, "0123456789"))
	n, _ := strconv.Atoi(s[:digits])
	if n < 400 || n > 599 {
		return 0
	}
	return n
}

// clientsErrors are parts of codes and types of errors that every engine finds in the request. The
// last three may also be in a message.
var clientsErrors = [...]string{
	"badrequest", "invalid", "notfound", "unprocessable", "validation", "valueerror", "unsupported", "toolarge", "toolong", "maxlength",
	"parameter", "clienterror", "usererror", "authentication", "unauthorized", "permission", "forbidden", "billing", "policy", "contentfilter",
	"contextlength", "contextsize", "contextwindow",
}

func (e *errorCause) name(raw []byte) {
	e.named = e.named || len(raw) > 0 && string(raw) != "error"
	e.words(raw, clientsErrors[:])
}

func (e *errorCause) text(raw []byte) { e.words(raw, clientsErrors[len(clientsErrors)-3:]) }

func (e *errorCause) words(raw []byte, clients []string) {
	letters := strings.Map(func(r rune) rune {
		switch {
		case 'A' <= r && r <= 'Z':
			return r + 'a' - 'A'
		case 'a' <= r && r <= 'z':
			return r
		}
		return -1
	}, rawjson.View(raw))
	e.aborted = e.aborted || strings.Contains(letters, "abort") || strings.Contains(letters, "cancel")
	for _, word := range clients {
		e.clients = e.clients || strings.Contains(letters, word)
	}
}
