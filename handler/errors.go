package handler

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// badRequestError is a request that asks for what cannot be.
type badRequestError struct {
	param string
	err   error
}

func (e *badRequestError) Error() string { return e.err.Error() }

// write answers with the error in OpenAI's shape.
func (e *badRequestError) write(w http.ResponseWriter) error {
	body, err := json.Marshal(map[string]any{"error": map[string]any{
		"message": e.Error(), "type": "invalid_request_error", "param": e.param, "code": "invalid_" + e.param,
	}})
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	_, err = w.Write(body)
	return err
}

// lastError tells Caddy's proxy not to make another attempt, even if the
// error in it is a dial error: it has no Unwrap.
type lastError struct{ error }

// Timeout lets the proxy answer with 504 where it would have.
func (e lastError) Timeout() bool {
	t, ok := e.error.(interface{ Timeout() bool }) //nolint:errorlint // as the proxy does
	return ok && t.Timeout()
}

// Temporary completes net.Error.
func (lastError) Temporary() bool { return false }

// statusOverloaded is what Dynamo's and Anthropic's servers answer when busy.
const statusOverloaded = 529

// retryable tells whether a status says that the worker did not take the
// request, so that another one may.
func retryable(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable || status == statusOverloaded
}

// retryAfter returns what a Retry-After header in seconds says, 0 if none.
func retryAfter(h http.Header) time.Duration {
	s, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || s < 0 || s > 3600 {
		return 0
	}
	return time.Duration(s) * time.Second
}

// brokenStreamEvent is the last that a client gets of a stream that breaks off
// on the engine's side. The empty line first ends an event that was cut.
var brokenStreamEvent = []byte("\n\ndata: " + `{"error":{"message":"the engine's answer broke off","type":"server_error","param":null,"code":"stream_broken"}}` + "\n\n")
