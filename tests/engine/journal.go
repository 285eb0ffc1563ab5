package engine

import (
	"net/http"
	"slices"
	"sync"
	"time"
)

// Outcome is what became of a request.
type Outcome string

const (
	// Running is a request that is being answered.
	Running Outcome = "running"
	// Finished is one whose answer was complete.
	Finished Outcome = "finished"
	// Aborted is one whose client left.
	Aborted Outcome = "aborted"
	// Refused is one that a fault answered with 429 or 503.
	Refused Outcome = "refused"
	// Broken is one that a fault or Kill ended in any other way.
	Broken Outcome = "broken"
	// Failed is one with an answer that is an error of its own, such as 400.
	Failed Outcome = "failed"
)

// Record is what an engine knows of one request that it received. Times are
// virtual, in milliseconds since the engine was first started.
type Record struct {
	// Seq counts the engine's requests from 1, in the order in which they had been
	// read.
	Seq uint64
	// Life counts the engine's starts from 1.
	Life      int
	AtMS      float64
	Method    string
	Path      string
	Header    http.Header
	BodyBytes int
	// Body is the body as it was sent, if bodies are kept.
	Body []byte

	// Rank is the data-parallel rank; -1 if none, as for what is not inference or was refused.
	Rank int
	// RankFrom is where the rank was asked for, header or body; empty if the
	// engine chose it.
	RankFrom     string
	PromptTokens int
	// Session is the id of the session that the request opens, closes or continues.
	Session string
	// SessionResult is what the engine did with it; empty if it did not come to that.
	SessionResult SessionResult
	// CachedTokens is -1 until the request was admitted.
	CachedTokens int
	AnswerTokens int
	// Held is whether it came while the engine slept.
	Held bool

	Outcome Outcome
	// Status is the answer's; 0 if no header was sent.
	Status int
	// FirstTokenMS is 0 until it was so.
	FirstTokenMS float64
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// journalSize is how many requests the journal remembers.
const journalSize = 100_000

// journal has the latest records, the oldest first.
type journal struct {
	mu   sync.Mutex
	list []*Record
	last uint64 // Seq of the latest
}

// add enters a record and gives it its Seq.
func (j *journal) add(r *Record) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.last++
	r.Seq = j.last
	if len(j.list) == journalSize {
		j.list = slices.Delete(j.list, 0, journalSize/10)
	}
	j.list = append(j.list, r)
}

// note changes a record.
func (j *journal) note(r *Record, change func(*Record)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	change(r)
}

func (j *journal) all() []Record {
	j.mu.Lock()
	defer j.mu.Unlock()
	out := make([]Record, len(j.list))
	for i, r := range j.list {
		out[i] = *r
	}
	return out
}
