package kvscore

// Override changes the policy for one request, by Dynamo's names (RouterConfigOverride
// in lib/kv-router/src/scheduling/config.rs). [Dynamo] and [PredictedLatency] apply it.
// Nil fields change nothing.
type Override struct {
	// OverlapScoreCredit is the credit for a cached token. PredictedLatency predicts the
	// prefill as if only this share of the tokens were cached; more than 1 is 1.
	OverlapScoreCredit *float64
	// PrefillLoadScale weighs prefill against decode. PredictedLatency multiplies wait,
	// prefill and delay by it.
	PrefillLoadScale *float64
	// Temperature samples from softmax(-cost/temperature), the costs normalised to
	// their range; 0 takes the lowest.
	Temperature *float64
	// AssumeKVReuse counts shared blocks once. PredictedLatency always does.
	AssumeKVReuse *bool
	// TrackPrefillTokens counts booked prefills. If it is false, PredictedLatency counts no
	// wait.
	TrackPrefillTokens *bool
}

// change changes a copy of the policy. Nil changes nothing.
func (o *Override) change(by *Dynamo) {
	if o == nil {
		return
	}
	put(&by.OverlapScoreCredit, o.OverlapScoreCredit)
	put(&by.PrefillLoadScale, o.PrefillLoadScale)
	put(&by.Temperature, o.Temperature)
	put(&by.AssumeKVReuse, o.AssumeKVReuse)
	put(&by.TrackPrefillTokens, o.TrackPrefillTokens)
}

func put[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}
