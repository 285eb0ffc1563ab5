package engine

import (
	"strconv"

	"github.com/tidwall/gjson"
)

// pathKVEvents names the publishers of vLLM 0.32 and later.
const pathKVEvents = "/kv_event_sources"

// sourcesByRank reads {"0": {"endpoint": ..., "replay_endpoint": ..., "topic": ...}, ...}, or a
// list of such objects that may be the member sources.
func (s *server) sourcesByRank() map[int]gjson.Result {
	of := make(map[int]gjson.Result)
	status, body := s.ask(pathKVEvents)
	if status != 200 || !gjson.ValidBytes(body) {
		return of
	}
	list := gjson.ParseBytes(body)
	if wrapped := list.Get("sources"); wrapped.IsArray() {
		list = wrapped
	}
	list.ForEach(func(key, one gjson.Result) bool {
		rank, err := len(of), error(nil)
		if !list.IsArray() {
			rank, err = strconv.Atoi(key.Str)
		} else if n := one.Get("data_parallel_rank"); n.Type == gjson.Number {
			rank = int(n.Num)
		}
		if err == nil && rank >= 0 && rank < maxRanks && one.IsObject() {
			of[rank] = one
		}
		return len(of) < maxRanks
	})
	return of
}

// readVLLMEvents reads the publishers. It ignores them if the ports of their ranks do not
// follow each other.
func (s *server) readVLLMEvents(to *KVEvents) {
	of := s.sourcesByRank()
	if len(of) == 0 {
		return
	}
	lowest := maxRanks
	for rank := range of {
		lowest = min(lowest, rank)
	}
	if lowest > 0 && len(of) > 1 {
		return // a part of a larger set, which the router cannot address
	}
	found := KVEvents{
		Endpoint: endpointIn(of[lowest].Get("endpoint")), Replay: endpointIn(of[lowest].Get("replay_endpoint")),
		Topic: endpointIn(of[lowest].Get("topic")), Publishers: len(of),
	}
	for rank, one := range of {
		if PortAfter(found.Endpoint, rank-lowest) != one.Get("endpoint").Str {
			return
		}
	}
	if found.Endpoint != "" {
		*to = found
	}
}
