package main

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// cut returns the part of a trace from so long before the median arrival to so long
// after it. A session in a closed loop has the turns that would arrive in that time
// if no answer took any. The first of them arrives at the beginning.
func cut(t *trace.Trace, before, after time.Duration) (*trace.Trace, error) {
	at := arrivals(t)
	sorted := slices.Sorted(slices.Values(at))
	from := max(0, sorted[len(sorted)/2]-before)
	to := from + before + after
	s := *t
	s.Requests = nil
	session := -1
	for i, q := range t.Requests {
		if at[i] < from || at[i] >= to {
			continue
		}
		if q.At = at[i] - from; t.Closed && q.Session != session {
			q.Think, session = 0, q.Session
		}
		s.Requests = append(s.Requests, q)
	}
	if len(s.Requests) == 0 {
		return nil, fmt.Errorf("%s has no requests from %v to %v", t.Name, from, to)
	}
	return &s, nil
}

// arrivals returns when each request arrives if no answer takes any time.
func arrivals(t *trace.Trace) []time.Duration {
	at := make([]time.Duration, len(t.Requests))
	for i := range t.Requests {
		q := &t.Requests[i]
		at[i] = q.At
		if t.Closed && i > 0 && t.Requests[i-1].Session == q.Session {
			at[i] = at[i-1] + q.Think
		}
	}
	return at
}

// blockTokens is how many tokens tell the blocks of a prompt apart; the rest of a
// block is filler.
const blockTokens = 3

// appendBody appends the body of request n: a completion of token ids, with the blocks
// in common with others that the trace says.
func appendBody(buf []byte, t *trace.Trace, n int) []byte {
	q := &t.Requests[n]
	buf = append(buf, `{"model":"`+model+`","stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,`...)
	buf = fmt.Appendf(buf, `"max_tokens":%d,"prompt":[`, q.Out)
	for at := 0; at < q.In; at += t.BlockTokens {
		// What does not fill a block is the request's own.
		i := at / t.BlockTokens
		hash := trace.Answer(n, i)
		if i < len(q.Blocks) {
			hash = q.Blocks[i]
		}
		buf = appendBlock(buf, hash, min(t.BlockTokens, q.In-at))
	}
	buf[len(buf)-1] = ']' // in place of the last comma
	return append(buf, '}')
}

// appendBlock appends tokens, each with a comma. Different hashes make different blocks.
func appendBlock(buf []byte, hash uint64, tokens int) []byte {
	const bits = 22
	for i := range tokens {
		if i < blockTokens {
			buf = append(strconv.AppendUint(buf, hash>>(bits*i)&(1<<bits-1), 10), ',')
		} else {
			buf = append(buf, "7,"...)
		}
	}
	return buf
}
