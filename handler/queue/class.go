package queue

import "time"

// Class is how urgent a request is, by the operator's rule. It is immutable. A nil class is the
// zero Class.
type Class struct {
	Name       string
	Weight     float64       // its share beside other classes; 0 stands for 1
	Background bool          // it runs only in what the others leave
	TTFT       time.Duration // the target of the time to the first token; 0: none
	Late       Late          // what happens to a request that cannot keep its target
	Demote     *Class        // the class that it then gets, if Late is Demote
	Tolerance  float64       // the factor by which predictions may be off for Late to count; 0 stands for 2
}

// Late says what happens to a request that cannot keep its class's target.
type Late uint8

// The ways to treat a request that will be late.
const (
	Serve  Late = iota // it waits all the same
	Refuse             // it is refused
	Demote             // it gets another class
)

func (c *Class) name() string {
	if c == nil {
		return ""
	}
	return c.Name
}

func (c *Class) isBackground() bool { return c != nil && c.Background }

func (c *Class) weight() float64 {
	if c == nil {
		return 1
	}
	return positive(c.Weight)
}
