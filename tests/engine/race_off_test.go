//go:build !race

package engine

// eventLoad is the most requests that TestTruth sends.
const eventLoad = 1500
