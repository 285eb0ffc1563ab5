package kvscore

import "strconv"

// Target is what is selected, bound, scored and indexed: one data-parallel
// rank of one worker. Workers without data parallelism have the one rank 0.
type Target struct {
	// Worker is the worker's id, configured or derived from its address.
	Worker uint64
	// Rank is the data-parallel rank inside the worker.
	Rank uint32
}

// String returns worker/rank, both in decimal.
func (t Target) String() string {
	return strconv.FormatUint(t.Worker, 10) + "/" + strconv.FormatUint(uint64(t.Rank), 10)
}
