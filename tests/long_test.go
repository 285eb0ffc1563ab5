package tests

import (
	"os"
	"time"
)

// inLong says that tests take their long form, which KVROUTER_LONG=1 asks for.
var inLong = os.Getenv("KVROUTER_LONG") == "1"

// span returns how long a part of a test takes: usually, and in its long form.
func span(usual, long time.Duration) time.Duration {
	if inLong {
		return long
	}
	return usual
}
