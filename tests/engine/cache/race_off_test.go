//go:build !race

package cache

const operations = 1_000_000
