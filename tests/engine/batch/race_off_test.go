//go:build !race

package batch

const operations = 1_000_000
