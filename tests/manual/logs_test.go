package manual

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// pattern returns the expression for a message of the code as documents write it. A
// variable part is a word in angle brackets, or a value. They may leave out what
// follows a last colon.
func pattern(message string) *regexp.Regexp {
	message, open := strings.CutSuffix(message, ": "+anything)
	parts := strings.Split(message, anything)
	for i, part := range parts {
		parts[i] = regexp.QuoteMeta(part)
	}
	expr := strings.Join(parts, ".+")
	if open {
		expr += "(: .+)?"
	}
	return regexp.MustCompile("^" + expr + "$")
}

// shown is a message in findings.
func shown(message string) string { return strings.ReplaceAll(message, anything, "<...>") }

// checkMessages compares messages of the code with the code spans in a column of the
// page's tables.
func checkMessages(p *page, kind, column string, messages []string) (found []string) {
	documented := p.column(column)
	known := make(map[string]bool)
	for _, m := range messages {
		expr, has := pattern(m), false
		for span := range documented {
			if expr.MatchString(span) {
				known[span], has = true, true
			}
		}
		if !has {
			found = append(found, fmt.Sprintf("%s: %s %q is not documented", p.path, kind, shown(m)))
		}
	}
	for _, span := range slices.Sorted(maps.Keys(documented)) {
		if !known[span] {
			found = append(found, fmt.Sprintf("%s:%d: %s %q is not in the code", p.path, documented[span], kind, span))
		}
	}
	return found
}

// TestLogLinesAreDocumented compares the log lines of level warn and error, and the
// conditions, with docs/troubleshooting.md. Its tables have a column "log line" or
// "condition". The conditions "fallback <reason>" have a table of their own.
func TestLogLinesAreDocumented(t *testing.T) {
	lines, conditions := mustCode(t).messages()
	if len(lines) < 8 || len(conditions) < 15 {
		t.Errorf("found %d log lines and %d conditions only", len(lines), len(conditions))
	}
	conditions = append(conditions, mustCode(t).constants("handler/discovery", regexp.MustCompile("^warn[A-Z]"))...)
	conditions = slices.DeleteFunc(conditions, func(s string) bool { return strings.HasPrefix(s, "fallback ") })
	p := mustPage(t, "docs/troubleshooting.md")
	report(t, checkMessages(p, "log line", "log line", lines))
	report(t, checkMessages(p, "condition", "condition", conditions))
}
