package kvscore

import (
	"math"
	"time"
)

// decayTime is the time after which a past value counts e^-1.
const decayTime = 2 * time.Minute

// decay returns what is left of a value of the given age.
func decay(age time.Duration) float64 { return math.Exp(-float64(max(0, age)) / float64(decayTime)) }

// recent is a sum of values that decay.
type recent struct {
	n  float64
	at time.Time
}

func (r *recent) value(now time.Time) float64 { return r.n * decay(now.Sub(r.at)) }

func (r *recent) add(now time.Time, v float64) { r.n, r.at = max(0, v+r.value(now)), now }

// traffic is what the scheduler learns of the requests of a pool.
type traffic struct {
	answer   float64 // tokens of an answer
	prefill  float64 // tokens of a prompt that its target lacked
	answers  uint64
	bookings uint64
	arrivals recent // requests
}

const (
	// trafficWeight is the weight of one request in an average. The first ones weigh more.
	trafficWeight = 0.005
	// assumedAnswer is the assumed length of an answer, in tokens, until answers end. It
	// weighs as much as assumedAnswers of them. With 0, decode would cost nothing.
	assumedAnswer, assumedAnswers = 200, 10
	// maxAnswer bounds the length that one answer adds, in tokens.
	maxAnswer = 32_768
)

func average(mean *float64, n uint64, v float64) {
	*mean += (v - *mean) * max(trafficWeight, 1/float64(n))
}

func (t *traffic) booked(now time.Time, prefill int64) {
	t.bookings++
	t.arrivals.add(now, 1)
	average(&t.prefill, t.bookings, float64(prefill))
}

func (t *traffic) answeredWith(tokens int64) {
	t.answers++
	average(&t.answer, t.answers+assumedAnswers, float64(tokens))
}
