package rules

import "github.com/caddy-kvrouter/kvrouter/kvscore"

// SMetric stays on the best match while the predicted time to the first token there
// is below Bound. Else it takes the lowest product of that time and the requests,
// this one included. It predicts as MinTTFT does. Of equally good matches it takes
// the one with the shortest time. Without any match there is nothing to stay on.
type SMetric struct {
	MinTTFT
	// Bound is in milliseconds.
	Bound float64
}

// SMetricBound is the bound that replays use. The rule leaves it open. Of 500, 1000,
// 2000 and 4000 ms this is the best for the rule on the shared traces.
const SMetricBound = 500

// Choose implements kvscore.Policy.
func (m *SMetric) Choose(s *kvscore.Selection) int {
	m.waits = grown(m.waits, len(s.Candidates))
	most := int64(0)
	for i := range s.Candidates {
		most = max(most, m.View.held(s, i))
	}
	time := func(i int) float64 { return m.waits[i].left(m.View.Now) + m.predict(s, i) }
	if most > 0 {
		const never = 1e12
		at := m.choose(s, func(i int) float64 {
			if m.View.held(s, i) < most {
				return never
			}
			return time(i)
		})
		if s.Candidates[at].Cost < m.Bound {
			return at
		}
	}
	return m.choose(s, func(i int) float64 { return time(i) * float64(s.Candidates[i].Requests+1) })
}
