package kvscore

import (
	"math"
	"time"
)

// stepTokens approximates the prompt tokens that an engine computes in one step: half of
// the usual limits. Each step also reads the context of the requests that generate.
const stepTokens = 2048

// work is the prefill of one prompt or of several. Its units give the coefficients
// similar sizes.
type work struct {
	tokens float64 // to be computed, in thousands
	pairs  float64 // of tokens that attention compares, in millions
}

// workOf returns the work for n tokens after k cached ones.
func workOf(n, k int64) work {
	f := float64(max(0, n))
	return work{f / 1e3, f * (float64(k) + f/2) / 1e6}
}

func (w *work) add(o work) { w.tokens += o.tokens; w.pairs += o.pairs }
func (w *work) sub(o work) { w.tokens -= o.tokens; w.pairs -= o.pairs }

// Latency are the coefficients of a predicted prefill time, in milliseconds:
//
//	Fixed + Token·n + Attention·n·(k + n/2) + Context·(1 + n/2048)·c
//
// for n prompt tokens to compute after k cached ones, on a target whose active requests
// have c tokens of context. Each term is a part of an engine's work. A step has a fixed
// cost. Each token passes through the weights, and attention compares it with the tokens
// before it. Each step reads the context of the generating requests.
type Latency struct {
	Fixed, Token, Attention, Context float64
}

// Prefill returns the predicted time for n tokens after k cached ones, in milliseconds.
// context is the context of the target's active requests, in tokens.
func (l Latency) Prefill(n, k int64, context float64) float64 {
	t := [nFeatures]float64{l.Fixed, l.Token * 1e3, l.Attention * 1e6, l.Context * contextScale}
	return featuresOf(1, workOf(n, k), context).times(&t)
}

const nFeatures = 4

// estimator learns the coefficients of a pool. It minimises the sum of squared errors,
// weighted with 1/(time + 5 ms). Each new sample reduces the weight of the older ones. No
// coefficient is below zero. A weak prior decides what the samples do not show.
type estimator struct {
	t        [nFeatures]float64             // ms for each of the features
	a        [nFeatures * nFeatures]float64 // by row
	b        [nFeatures]float64
	samples  uint64
	outliers int // in a row
}

const (
	// forgetting is the factor on the weight of older samples with each new one: the
	// weight halves after 1,400 samples.
	forgetting = 0.9995
	// sweeps is the number of passes of coordinate descent per sample. Each begins at
	// the last solution, and one sample changes little.
	sweeps = 4
	// trusting is the number of samples from which on the estimator recognises outliers.
	trusting = 20
	// maxOutlier bounds the factor between a sample's time and the predicted time.
	maxOutlier = 3
	// maxOutliers is the number of consecutive outliers that are bounded. After more of
	// them the engines have changed, and the estimator begins anew.
	maxOutliers = 10
	// shortTime, in milliseconds, bounds the weight of short times.
	shortTime = 5
)

// priorTimes are optimistic: the router would never try a target that it believes to be
// slow. priorWeight is their weight: 1 by the square of what each may be off by, which is about
// its own size.
var (
	leastTimes  = [nFeatures]float64{0, 0.5, 0, 0} // no token is free
	priorTimes  = [nFeatures]float64{5, 30, 0.5, 3}
	priorWeight = [nFeatures]float64{0.04, 0.0011, 1, 0.01}
)

// leastAttention and mostAttention bound the time for a million pairs of tokens, relative to that
// for 1,000 tokens. Models of 1B to 70B parameters are at 0.02 to 0.07. Samples with prefixes of
// about one length cannot tell the two apart.
const leastAttention, mostAttention = 0.005, 0.2

// contextScale is the tokens of context in one unit of its feature.
const contextScale = 1e5

// features are what the coefficients are multiplied with. A struct stays in registers.
type features struct{ fixed, tokens, pairs, context float64 }

// featuresOf returns the features of a work on a target with the given tokens of context.
// fixed is 1 if the work includes the fixed cost of a step, and 0 if another prefill pays it.
func featuresOf(fixed float64, w work, context float64) features {
	return features{fixed, w.tokens, w.pairs, (fixed + w.tokens*(1e3/stepTokens)) * context * (1 / contextScale)}
}

// times returns the predicted time with the given coefficients, in milliseconds.
func (f features) times(t *[nFeatures]float64) float64 {
	return t[0]*f.fixed + t[1]*f.tokens + t[2]*f.pairs + t[3]*f.context
}

func (e *estimator) predict(f features) (ms float64) { return f.times(&e.t) }

// learn adds a sample: the features of a work, and its time in milliseconds.
func (e *estimator) learn(f features, ms float64) {
	x := [nFeatures]float64{f.fixed, f.tokens, f.pairs, f.context}
	expected := e.predict(f)
	if e.samples >= trusting {
		within := min(max(ms, expected/maxOutlier), expected*maxOutlier)
		if e.outliers++; ms == within {
			e.outliers = 0
		} else if e.outliers <= maxOutliers {
			ms = within
		} else {
			*e = estimator{t: e.t, samples: e.samples}
		}
	}
	weight := 1 / (ms + shortTime)
	// Older samples lose weight only where this one shows something. While all prompts are
	// short, the coefficients keep what long ones have shown. The method is directional
	// forgetting (Kulhavý 1987).
	var v [nFeatures]float64
	known, time := 0.0, 0.0
	for i := range x {
		for j := range x {
			v[i] += e.a[i*nFeatures+j] * x[j]
		}
		known += v[i] * x[i]
		time += e.b[i] * x[i]
	}
	lost := 0.0
	if known > 0 {
		lost = (1 - forgetting) / known
	}
	for i := range x {
		e.b[i] += weight*x[i]*ms - lost*v[i]*time
		for j := range x {
			e.a[i*nFeatures+j] += weight*x[i]*x[j] - lost*v[i]*v[j]
		}
	}
	e.samples++
	for range sweeps {
		e.descend()
	}
}

// descend does one pass of coordinate descent.
func (e *estimator) descend() {
	for i := range e.t {
		rest := e.b[i] + priorWeight[i]*priorTimes[i]
		for j := range e.t {
			if j != i {
				rest -= e.a[i*nFeatures+j] * e.t[j]
			}
		}
		e.t[i] = max(leastTimes[i], rest/(e.a[i*nFeatures+i]+priorWeight[i]))
		switch i {
		case 1:
			e.t[1] = max(e.t[1], e.t[2]/mostAttention)
		case 2:
			e.t[2] = min(max(e.t[2], leastAttention*e.t[1]), mostAttention*e.t[1])
		}
	}
}

func newEstimator() *estimator { return &estimator{t: priorTimes} }

func (e *estimator) latency() Latency {
	return Latency{e.t[0], e.t[1] / 1e3, e.t[2] / 1e6, e.t[3] / contextScale}
}

const (
	// factorWeight is the weight of one sample in a target's factor. The first samples
	// weigh more.
	factorWeight = 0.05
	// minFactor and maxFactor bound a factor.
	minFactor, maxFactor = 1.0 / fastest, 100
)

// speed is how many times longer a target takes than its pool predicts, or a transfer than assumed.
// Without samples, the factor decays to 1, so that the router tries what was slow again.
type speed struct {
	log     float64 // natural logarithm of the factor
	samples uint64
	at      time.Time // of the last sample

	now      float64 // the factor when it was last computed
	computed time.Time
}

func (s *speed) learn(now time.Time, predicted, ms, weight float64) {
	off := math.Log(max(ms, 1e-3) / max(predicted, 1e-3))
	off = min(max(off, -math.Log(maxOutlier)), math.Log(maxOutlier))
	s.log = s.faded(now)
	s.samples++
	weight = max(weight, 0.5/float64(s.samples)) * ms / (ms + 20) // short times are noise
	s.log = min(max(s.log+weight*off, math.Log(minFactor)), math.Log(maxFactor))
	s.at, s.computed = now, time.Time{}
}

func (s *speed) faded(now time.Time) float64 {
	if s.samples == 0 {
		return 0
	}
	return s.log * decay(now.Sub(s.at))
}

// factor returns the factor, computed at most once per second.
func (s *speed) factor(now time.Time) float64 {
	if s.samples == 0 {
		return 1
	}
	if d := now.Sub(s.computed); d > time.Second || d < 0 {
		s.now, s.computed = math.Exp(s.faded(now)), now
	}
	return s.now
}
