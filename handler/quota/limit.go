// Package quota bounds what each tenant uses: tokens and requests in a time, and requests at once.
// It reserves by an estimate when a request begins, and settles when the request ends. It knows no
// request and no engine. The caller gives the time, and carries changes to other routers.
package quota

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Unit is what a limit counts.
type Unit uint8

// The units of limits. Concurrent counts the requests that have begun and not ended.
const (
	Requests Unit = iota
	Tokens
	Concurrent

	units
)

var unitNames = [units]string{"requests", "tokens", "concurrent"}

func (u Unit) String() string { return unitNames[u] }

// Window is the time of a limit. In a duration, the amount comes back bit by bit. At the end of a part
// of the calendar, in UTC, all of it does.
type Window time.Duration

// Parts of the calendar. A limit of concurrent requests has the zero Window.
const (
	Day   Window = -1
	Month Window = -2
)

// The shortest and the longest Window that is no part of the calendar.
const (
	minWindow = Window(time.Second)
	maxWindow = Window(24 * time.Hour)
)

func (w Window) String() string {
	switch w { //nolint:exhaustive // the others are durations
	case Day:
		return "day"
	case Month:
		return "month"
	}
	s := time.Duration(w).String()
	for _, zero := range []string{"m0s", "h0m"} { // 1m0s is 1m
		if strings.HasSuffix(s, zero) {
			s = s[:len(s)-2]
		}
	}
	return s
}

// period returns the number of the part of the calendar that a time is in, and when it ends.
func (w Window) period(t time.Time) (n int64, end time.Time) {
	t = t.UTC()
	if w == Month {
		y, m, _ := t.Date()
		return int64(y)*12 + int64(m), time.Date(y, m+1, 1, 0, 0, 0, 0, time.UTC)
	}
	end = t.Truncate(24 * time.Hour).Add(24 * time.Hour)
	return end.Unix() / 86400, end
}

// Limit is the most that one tenant uses in a time. Its text is like "tokens 2M per 1m",
// "requests 600 per day" or "concurrent 64".
type Limit struct {
	Unit   Unit
	Amount int64
	Per    Window
}

// maxAmount bounds amounts, so that sums are exact.
const maxAmount = 1e15

// ParseLimit reads the text of a limit.
func ParseLimit(text string) (l Limit, err error) {
	words := strings.Fields(text)
	if len(words) != 2 && (len(words) != 4 || words[2] != "per") {
		return l, errLimit(text)
	}
	for l.Unit = 0; l.Unit < units && unitNames[l.Unit] != words[0]; {
		l.Unit++
	}
	if l.Unit == units || (l.Unit == Concurrent) != (len(words) == 2) {
		return l, errLimit(text)
	}
	if l.Amount, err = parseAmount(words[1]); err != nil || l.Unit == Concurrent {
		return l, err
	}
	switch words[3] {
	case "day":
		l.Per = Day
	case "month":
		l.Per = Month
	default:
		d, err := time.ParseDuration(words[3])
		if l.Per = Window(d); err != nil || l.Per < minWindow || l.Per > maxWindow {
			return l, fmt.Errorf("the time of a limit must be day, month, or between 1s and 24h, got %q", words[3])
		}
	}
	return l, nil
}

func errLimit(text string) error {
	return fmt.Errorf("a limit must be like 'tokens 2M per 1m', 'requests 600 per day' or 'concurrent 64', got %q", text)
}

// parseAmount reads a number such as 600, 2M or 1.5k.
func parseAmount(s string) (int64, error) {
	number, factor := s, 1.0
	for suffix, f := range map[string]float64{"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9} {
		if n, ok := strings.CutSuffix(s, suffix); ok {
			number, factor = n, f
		}
	}
	n, err := strconv.ParseFloat(number, 64)
	if n *= factor; err != nil || !(n >= 0 && n <= maxAmount) || n != math.Trunc(n) || strings.ContainsAny(number, "xXpP_eE") {
		return 0, fmt.Errorf("the amount of a limit must be a whole number such as 600, 500k or 2M, got %q", s)
	}
	return int64(n), nil
}

// String implements fmt.Stringer.
func (l Limit) String() string {
	amount := l.Amount
	suffix := ""
	for _, s := range []string{"k", "M", "G"} {
		if amount == 0 || amount%1000 != 0 {
			break
		}
		amount, suffix = amount/1000, s
	}
	s := l.Unit.String() + " " + strconv.FormatInt(amount, 10) + suffix
	if l.Unit != Concurrent {
		s += " per " + l.Per.String()
	}
	return s
}

// MarshalText implements encoding.TextMarshaler.
func (l Limit) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Limit) UnmarshalText(text []byte) (err error) {
	*l, err = ParseLimit(string(text))
	return err
}

// CheckLimits returns an error if limits contradict each other.
func CheckLimits(limits []Limit) error {
	if len(limits) > maxLimits {
		return fmt.Errorf("a tenant can have at most %d limits", maxLimits)
	}
	for i, l := range limits {
		switch {
		case l.Unit >= units || l.Amount < 0 || l.Amount > maxAmount || (l.Unit == Concurrent) != (l.Per == 0):
			return errors.New("a limit is incomplete")
		}
		for _, other := range limits[:i] {
			if other.Unit == l.Unit && other.Per == l.Per {
				return fmt.Errorf("two limits are for the same time: %q and %q", other, l)
			}
		}
	}
	return nil
}

// maxLimits bounds the limits of a tenant.
const maxLimits = 16
