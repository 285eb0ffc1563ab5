package worker

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// RequestLimit is the most requests that a worker has at a time: a positive number, or
// LimitAuto. The zero value is no limit. In JSON it is a number or "auto".
type RequestLimit int

// LimitAuto is the limit that the engine reports, and no limit while it reports none.
const LimitAuto RequestLimit = -1

const limitAuto = "auto"

// String implements fmt.Stringer.
func (l RequestLimit) String() string {
	if l == LimitAuto {
		return limitAuto
	}
	return strconv.Itoa(int(l))
}

// ParseRequestLimit parses a positive number or auto.
func ParseRequestLimit(s string) (l RequestLimit, ok bool) {
	if s == limitAuto {
		return LimitAuto, true
	}
	n, err := strconv.Atoi(s)
	return RequestLimit(n), err == nil && n > 0
}

// MarshalJSON implements json.Marshaler.
func (l RequestLimit) MarshalJSON() ([]byte, error) {
	if l == LimitAuto {
		return []byte(`"` + limitAuto + `"`), nil
	}
	return strconv.AppendInt(nil, int64(l), 10), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *RequestLimit) UnmarshalJSON(b []byte) error {
	if string(b) == `"`+limitAuto+`"` {
		*l = LimitAuto
		return nil
	}
	var n int
	if err := json.Unmarshal(b, &n); err != nil || n < 0 {
		return fmt.Errorf(`max_running: must be a positive whole number or "auto", got %s`, b)
	}
	*l = RequestLimit(n)
	return nil
}
