// Package docs is the manual. The router itself shows some of its sentences.
package docs

import (
	_ "embed"
	"regexp"
	"strings"
	"sync"
)

//go:embed messages.md
var messages string

var link = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)

// advice is what messages.md says of each log line and condition that something can be done about.
var advice = sync.OnceValue(func() map[string]string {
	of := make(map[string]string)
	for line := range strings.Lines(messages) {
		if cells := strings.Split(strings.TrimSpace(line), " | "); len(cells) > 1 {
			text := link.ReplaceAllString(strings.TrimSuffix(cells[len(cells)-1], " |"), "$1")
			of[strings.Trim(cells[0], "|` ")] = strings.ReplaceAll(text, "`", "")
		}
	}
	return of
})

// Advice returns what to do about a condition, as plain text; "" if the manual does not say.
func Advice(condition string) string { return advice()[strings.TrimPrefix(condition, "fallback ")] }
