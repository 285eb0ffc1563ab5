package kvscore

// Units of the costs that policies compare.
const (
	UnitMilliseconds = "ms"
	UnitBlocks       = "blocks"
	UnitRequests     = "requests"
)

// CostUnit returns the unit of a policy's costs, which the policy names by a method of
// this name. It is empty if the policy compares no costs, or does not name the unit.
func CostUnit(p Policy) string {
	if u, ok := p.(interface{ CostUnit() string }); ok {
		return u.CostUnit()
	}
	return ""
}

func (*PredictedLatency) CostUnit() string { return UnitMilliseconds }
func (*Dynamo) CostUnit() string           { return UnitBlocks }
func (*LeastLoad) CostUnit() string        { return UnitRequests }
func (*PowerOfTwo) CostUnit() string       { return UnitRequests }
