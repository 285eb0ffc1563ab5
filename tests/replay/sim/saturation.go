package sim

import (
	"errors"
	"math"
)

const (
	// saturated is how many times longer a first token takes at saturation than at a
	// quarter of the speed.
	saturated = 5.0
	// bisections make the speed exact to a 32nd of a doubling, 2 %.
	bisections = 5
	// slowest and fastest bound the search.
	slowest, fastest = 1.0 / 512, 512.0
)

// Saturation finds the highest speed at which the policy of the cell is not
// saturated. It is saturated where its mean TTFT is above 5 times that at a quarter
// of the speed. A closed loop limits its own queues. It is saturated, too, where the
// mean answer takes longer than the mean think time. Speeds are searched upwards and downwards from 1 by
// doubling, then by bisection of their logarithm; every step is a full replay.
func Saturation(c Config) (float64, error) {
	s := search{Config: c, known: make(map[float64]*Result)}
	low := 1.0
	over, err := s.over(low)
	for over && err == nil && low > slowest {
		low /= 2
		over, err = s.over(low)
	}
	if over && err == nil {
		return 0, errors.New("saturated at any speed")
	}
	high := 2 * low
	for err == nil && high <= fastest {
		if over, err = s.over(high); over {
			break
		}
		low, high = high, 2*high
	}
	if err != nil || high > fastest {
		return low, err
	}
	for range bisections {
		middle := math.Sqrt(low * high)
		if over, err = s.over(middle); err != nil {
			return 0, err
		}
		if over {
			high = middle
		} else {
			low = middle
		}
	}
	return low, nil
}

// search keeps the results of the speeds that were replayed.
type search struct {
	Config
	known map[float64]*Result
}

func (s *search) at(speed float64) (*Result, error) {
	if r := s.known[speed]; r != nil {
		return r, nil
	}
	s.Speed = speed
	r, err := Run(s.Config)
	if err == nil {
		s.known[speed] = r
	}
	return r, err
}

// over tells whether the policy is saturated at a speed.
func (s *search) over(speed float64) (bool, error) {
	r, err := s.at(speed)
	if err != nil {
		return false, err
	}
	if s.Trace.Closed && r.MeanE2E > milliseconds(s.Trace.MeanThink())/speed {
		return true, nil
	}
	slow, err := s.at(speed / 4)
	if err != nil {
		return false, err
	}
	return r.MeanTTFT > saturated*slow.MeanTTFT, nil
}
