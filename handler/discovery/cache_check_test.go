package discovery

import "testing"

// TestReportsAreOfTheirKind has one kind of answer report what was cached.
func TestReportsAreOfTheirKind(t *testing.T) {
	var d reports
	plain, stream := ReportKind{"chat", false}, ReportKind{"chat", true}
	if d.reported(plain, false) {
		t.Error("something is said to be reported before it was")
	}
	if !d.reported(plain, true) || !d.reported(plain, false) || d.reported(stream, false) || d.reported(ReportKind{"messages", false}, false) {
		t.Error("what one kind reports is said of others, or not of itself")
	}
	if d.reset(); d.reported(plain, false) {
		t.Error("what another life reported counts")
	}
}
