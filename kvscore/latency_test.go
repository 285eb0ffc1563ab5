package kvscore

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// engine is a target with known coefficients, whose times are noisy.
type engine struct {
	Latency
	noise float64
}

var (
	fastEngine = engine{Latency{8, 0.02, 8e-7, 2e-5}, 0.1}
	slowEngine = engine{Latency{40, 0.5, 3e-5, 4e-4}, 0.1}
)

// Prefill is the formula of [Latency], written out.
func (e engine) Prefill(n, k int64, context float64) float64 {
	f := float64(n)
	return e.Fixed + e.Token*f + e.Attention*f*(float64(k)+f/2) + e.Context*(1+f/2048)*context
}

// sample returns a random work, from short prompts to long ones, and its time.
func (e engine) sample(rnd *rand.Rand) (w work, context, ms float64) {
	n := int64(50 * math.Pow(400, rnd.Float64()))
	k := rnd.Int64N(2) * rnd.Int64N(50_000)
	context = float64(rnd.IntN(3)) * 100_000 * rnd.Float64()
	ms = e.Prefill(n, k, context) * max(0.1, 1+e.noise*rnd.NormFloat64())
	return workOf(n, k), context, ms
}

func (e engine) teach(to *estimator, rnd *rand.Rand, samples int) {
	for range samples {
		w, context, ms := e.sample(rnd)
		to.learn(featuresOf(1, w, context), ms)
	}
}

// follows fails the test unless an estimator predicts the engine's times within a share.
func (e engine) follows(t *testing.T, got Latency, within float64) {
	t.Helper()
	for _, c := range []struct {
		n, k    int64
		context float64
	}{{500, 0, 0}, {4000, 0, 0}, {20_000, 0, 0}, {500, 40_000, 0}, {4000, 20_000, 100_000}, {200, 0, 200_000}} {
		want := e.Prefill(c.n, c.k, c.context)
		if ms := got.Prefill(c.n, c.k, c.context); !near(ms, want, within) {
			t.Errorf("%d tokens behind %d with %v of context: %.1f ms, want %.1f within %.0f %%", c.n, c.k, c.context, ms, want, within*100)
		}
	}
}

func TestEstimatorLearnsCoefficients(t *testing.T) {
	for name, e := range map[string]engine{"fast": fastEngine, "slow": slowEngine} {
		for seed := range uint64(3) {
			learned := newEstimator()
			e.teach(learned, seeded(seed), 3000)
			got := learned.latency()
			for _, c := range []struct {
				name      string
				got, want float64
			}{
				{"fixed", got.Fixed, e.Fixed},
				{"token", got.Token, e.Token},
				{"attention", got.Attention, e.Attention},
				{"context", got.Context, e.Context},
			} {
				if !near(c.got, c.want, 0.12) {
					t.Errorf("%s, seed %d: %s is %.3g, want %.3g", name, seed, c.name, c.got, c.want)
				}
			}
			e.follows(t, got, 0.05)
		}
	}
}

func TestOutliersDoNotSpoilTheEstimate(t *testing.T) {
	for _, tc := range []struct {
		name   string
		within float64
		teach  func(e *estimator, rnd *rand.Rand)
	}{
		{"a pause of 30 s at first", 0.15, func(e *estimator, rnd *rand.Rand) {
			e.learn(featuresOf(1, workOf(1000, 0), 0), 30_000)
			fastEngine.teach(e, rnd, 300)
		}},
		{"a pause of 30 s now", 0.15, func(e *estimator, rnd *rand.Rand) {
			fastEngine.teach(e, rnd, 300)
			e.learn(featuresOf(1, workOf(1000, 0), 0), 30_000)
		}},
		{"a pause every 100 samples", 0.15, func(e *estimator, rnd *rand.Rand) {
			for range 10 {
				fastEngine.teach(e, rnd, 99)
				e.learn(featuresOf(1, workOf(1000, 0), 0), 30_000)
			}
		}},
		{"one in 20 took no time", 0.4, func(e *estimator, rnd *rand.Rand) {
			for range 20 {
				fastEngine.teach(e, rnd, 19)
				w, context, _ := fastEngine.sample(rnd)
				e.learn(featuresOf(1, w, context), 0.1)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEstimator()
			tc.teach(e, seeded(2))
			fastEngine.follows(t, e.latency(), tc.within)
		})
	}
}

// sound fails the test unless all that is predicted is finite and not below zero.
func sound(t *testing.T, e *estimator) {
	t.Helper()
	for i, c := range e.t {
		if math.IsNaN(c) || math.IsInf(c, 0) || c < 0 {
			t.Fatalf("coefficient %d is %v", i, c)
		}
	}
	for _, n := range []int64{-1, 0, 1, 4096, 1 << 40} {
		for _, context := range []float64{0, 1e5, 1e12} {
			for _, ms := range []float64{
				e.predict(featuresOf(0, workOf(n, 0), context)), e.predict(featuresOf(0, workOf(n, 1<<40), context)),
				e.latency().Prefill(n, 1<<40, context), e.predict(featuresOf(1, workOf(n, 5), context)),
			} {
				if math.IsNaN(ms) || math.IsInf(ms, 0) || ms < 0 {
					t.Fatalf("%d tokens with %v of context are predicted to take %v ms", n, context, ms)
				}
			}
		}
	}
}

// FuzzEstimator learns from whatever samples, each made of 16 bytes.
func FuzzEstimator(f *testing.F) {
	f.Add([]byte("a prompt of some tokens, and then another one, which takes longer"))
	f.Add(make([]byte, 400))
	huge := make([]byte, 1600)
	for i := range huge {
		huge[i] = 0xff
	}
	f.Add(huge)
	f.Fuzz(func(t *testing.T, data []byte) {
		e, s, at := newEstimator(), speed{}, epoch
		for ; len(data) >= 16; data = data[16:] {
			// each number is small or huge, by a shift of its own
			number := func(i int) int64 {
				bits := binary.LittleEndian.Uint32(data[i:])
				return int64(bits>>5) << (bits & 31)
			}
			w := workOf(number(0), number(4))
			context, ms := float64(number(8)), float64(number(12))/1000
			x := featuresOf(1, w, context)
			at = at.Add(time.Duration(number(12)))
			s.learn(at, e.predict(x)*s.factor(at), ms, factorWeight)
			e.learn(x, ms)
			sound(t, e)
			if f := s.factor(at); !(f >= minFactor*0.999 && f <= maxFactor*1.001) {
				t.Fatalf("factor %v", f)
			}
		}
	})
}

// slowed teaches s with samples of a target that takes so many times longer than its
// pool, one a second, and returns the factor.
func slowed(s *speed, at *time.Time, times float64, samples int) float64 {
	rnd := seeded(9)
	for range samples {
		*at = at.Add(time.Second)
		pool := 20 + 200*rnd.Float64()
		s.learn(*at, pool*s.factor(*at), pool*times*(1+0.1*rnd.NormFloat64()), factorWeight)
	}
	return s.factor(*at)
}

func TestSlownessIsFoundAndForgotten(t *testing.T) {
	var s speed
	at := epoch
	if f := s.factor(at); f != 1 {
		t.Errorf("factor %v before anything is learned", f)
	}
	if f := slowed(&s, &at, 2, 60); !near(f, 2, 0.15) {
		t.Errorf("factor %.2f after 60 samples of a target that takes twice as long", f)
	}
	found := s.factor(at)
	if f := s.factor(at.Add(decayTime)); !near(math.Log(f), math.Log(found)/math.E, 0.01) {
		t.Errorf("%.2f became %.2f in %s, want e^-1 of its logarithm", found, f, decayTime)
	}
	if f := s.factor(at.Add(20 * time.Minute)); !near(f, 1, 0.01) {
		t.Errorf("factor %.2f after 20 minutes without samples", f)
	}
	if f := s.factor(at.Add(-time.Hour)); f != found {
		t.Errorf("factor %.2f an hour before, want %.2f", f, found)
	}
	if f := slowed(&s, &at, 0.5, 100); !near(f, 0.5, 0.15) {
		t.Errorf("factor %.2f after 100 samples of a target that takes half as long", f)
	}
}

// TestEstimatorRecovers gives an estimator that has learned one engine, or nonsense, the
// times of a very different one.
func TestEstimatorRecovers(t *testing.T) {
	sample := func(e *estimator, n int, ms float64) { e.learn(featuresOf(1, workOf(int64(n), 0), 0), ms) }
	for name, tc := range map[string]struct {
		before func(e *estimator)
		slower float64
	}{
		"after times of 0":     {func(e *estimator) { learnEach(e, 300, sample, 0) }, 1},
		"ten times slower":     {func(e *estimator) { learnEach(e, 3000, sample, 1) }, 10},
		"ten times faster":     {func(e *estimator) { learnEach(e, 3000, sample, 1) }, 0.1},
		"a hundred times that": {func(e *estimator) { learnEach(e, 3000, sample, 1) }, 100},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEstimator()
			tc.before(e)
			learnEach(e, 300, sample, tc.slower)
			want := tc.slower * (10 + 0.05*4000)
			if got := e.predict(featuresOf(1, workOf(4000, 0), 0)); got < want*0.8 || got > want*1.25 {
				t.Errorf("4000 tokens are predicted to take %.4g ms, want about %.4g", got, want)
			}
		})
	}
}

// learnEach teaches the times of an engine that takes 10 ms + 0.05 ms per token, times
// a factor.
func learnEach(e *estimator, samples int, sample func(*estimator, int, float64), factor float64) {
	for i := range samples {
		n := 500 + i*37%7500
		sample(e, n, factor*(10+0.05*float64(n)))
	}
}

func near(a, b, share float64) bool { return math.Abs(a-b) <= share*b }
