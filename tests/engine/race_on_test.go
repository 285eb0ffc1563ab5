//go:build race

package engine

// eventLoad is fewer requests in TestTruth under the race detector, which makes each one slow.
const eventLoad = 300
