package dispatch

import (
	"strconv"
	"testing"
)

func TestUsersHaveABound(t *testing.T) {
	u := &users{names: make(map[string]bool)}
	for i := range maxUsers - 1 {
		u.label(strconv.Itoa(i))
	}
	for name, want := range map[string]string{"0": "0", "0\xff": "0�"} {
		if got := u.label(name); got != want {
			t.Errorf("user %q has the label %q, want %q", name, got, want)
		}
	}
	if got := u.label("late"); got != otherUsers {
		t.Errorf("the user after the last has the label %q, want %q", got, otherUsers)
	}
	if got := u.label("0\xff"); got != "0�" {
		t.Errorf("a user from before has the label %q", got)
	}
}
