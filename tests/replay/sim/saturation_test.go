package sim

import (
	"testing"
)

// TestSaturationOfAnOpenLoop looks for the speed at which requests arrive as fast as
// one engine serves them.
func TestSaturationOfAnOpenLoop(t *testing.T) {
	if testing.Short() {
		t.Skip("many replays in one goroutine")
	}
	tr := apart(400, 1600)
	for i := range tr.Requests {
		tr.Requests[i].At /= 10 // one a second
	}
	c := cell(tr, "dynamo")
	c.Workers = 1
	speed, err := Saturation(c)
	if err != nil {
		t.Fatal(err)
	}
	// A request takes a step of 1600 tokens, and its second token most of a further
	// one.
	if speed < 11 || speed > 17 {
		t.Errorf("saturated at %v requests a second, want about 13", speed)
	}
	at := func(speed float64) float64 {
		c.Speed = speed
		return mustRun(t, c).MeanTTFT
	}
	if at(speed) > 5*at(speed/4) || at(speed*1.03) <= 5*at(speed*1.03/4) {
		t.Errorf("TTFT at %v is %v, faster %v", speed, at(speed), at(speed*1.03))
	}
	if again, _ := Saturation(c); again != speed {
		t.Errorf("%v and then %v", speed, again)
	}
}

func TestSaturationOfAClosedLoop(t *testing.T) {
	if testing.Short() {
		t.Skip("many replays in one goroutine")
	}
	tr := synthetic(t, 600, true)
	c := cell(tr, "dynamo")
	speed, err := Saturation(c)
	if err != nil {
		t.Fatal(err)
	}
	c.Speed = speed
	think := milliseconds(tr.MeanThink())
	if r := mustRun(t, c); r.MeanE2E > think/speed {
		t.Errorf("at %v an answer takes %v ms, thinking %v", speed, r.MeanE2E, think/speed)
	}
}
