//go:build !race

package tests

// underRace says that the race detector is on: requests cost tens of times more.
const underRace = false
