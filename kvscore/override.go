package kvscore

// Override changes options of [Dynamo] for one request, by Dynamo's names
// (RouterConfigOverride in lib/kv-router/src/scheduling/config.rs). Fields that
// are nil change nothing.
type Override struct {
	OverlapScoreCredit *float64
	PrefillLoadScale   *float64
	Temperature        *float64
	AssumeKVReuse      *bool
	TrackPrefillTokens *bool
}

// of returns the policy with the changes. It has no memory of its own.
func (o *Override) of(d *Dynamo) *Dynamo {
	by := &Dynamo{
		OverlapScoreCredit: d.OverlapScoreCredit, CreditDecay: d.CreditDecay, PrefillLoadScale: d.PrefillLoadScale,
		DecodeActiveRequestWeight: d.DecodeActiveRequestWeight, Temperature: d.Temperature,
		IgnorePrefillTokens: d.IgnorePrefillTokens, IgnoreActiveBlocks: d.IgnoreActiveBlocks,
		IgnoreOutputBlocks: d.IgnoreOutputBlocks, NoKVReuse: d.NoKVReuse,
		SpreadStems: d.SpreadStems, StayBlocks: d.StayBlocks, EvenBlocks: d.EvenBlocks,
	}
	put(&by.OverlapScoreCredit, o.OverlapScoreCredit)
	put(&by.PrefillLoadScale, o.PrefillLoadScale)
	put(&by.Temperature, o.Temperature)
	if o.AssumeKVReuse != nil {
		by.NoKVReuse = !*o.AssumeKVReuse
	}
	if o.TrackPrefillTokens != nil {
		by.IgnorePrefillTokens = !*o.TrackPrefillTokens
	}
	return by
}

func put(to, from *float64) {
	if from != nil {
		*to = *from
	}
}
