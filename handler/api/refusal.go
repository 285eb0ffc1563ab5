package api

// Codes of the router's own errors. They are stable.
const (
	CodeNVExt        = "invalid_nvext"
	CodePin          = "invalid_pin"
	CodeTooLarge     = "body_too_large"
	CodeUnreadable   = "body_unreadable"
	CodeNoModel      = "model_not_found"
	CodeShared       = "cache_salt_unsupported"
	CodeNoWorker     = "no_worker"
	CodeFailed       = "worker_failed"
	CodeTimeout      = "worker_timeout"
	CodeQueueFull    = "queue_full"
	CodeQueueTimeout = "queue_timeout"
)

// Refusal is an error of the router's own, with which it answers a request.
type Refusal struct {
	API        API // of the request; nil if it is for no known API
	Status     int
	Code       string
	Param      string // the member or header at fault, if one is
	Err        error
	RetryAfter int // seconds after which the client may try again; 0 if unknown
}

// Error implements error.
func (r *Refusal) Error() string { return r.Err.Error() }

// Body returns the body of the answer, see [ErrorBody].
func (r *Refusal) Body() []byte { return ErrorBody(r.API, r.Status, r.Code, r.Error(), r.Param) }
