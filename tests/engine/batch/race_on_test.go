//go:build race

package batch

// operations is fewer under the race detector, which makes each one slow.
const operations = 60_000
