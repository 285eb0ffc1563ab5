package worker

import (
	"slices"
	"testing"
	"time"
)

// epoch is when the tests' clocks begin.
var epoch = time.Unix(1_800_000_000, 0)

// TestMarksHaveALength fails a worker each time that it gets requests again. Marks grow, but not those of a
// busy worker. The worker may ask for a length, within bounds.
func TestMarksHaveALength(t *testing.T) {
	for _, v := range []struct {
		busy  bool
		wait  time.Duration
		downs []time.Duration
	}{
		{false, 0, []time.Duration{firstDown, 2 * firstDown, 4 * firstDown, longestMark, longestMark}},
		{true, 0, []time.Duration{firstDown, firstDown, firstDown}},
		{true, time.Millisecond, []time.Duration{firstDown, firstDown, firstDown}},
		{true, 2 * time.Second, []time.Duration{2 * time.Second, 2 * time.Second, 2 * time.Second}},
		{true, time.Hour, []time.Duration{longestMark, longestMark, longestMark}},
	} {
		var h Health
		now := epoch
		for i, down := range v.downs {
			mark := h.Admit(now)
			if was := h.Fail(now, now, v.wait, v.busy); was != (i == 0) {
				t.Errorf("%+v: failure %d: well before: %v", v, i+1, was)
			}
			h.Leave(mark)
			if h.Available(now.Add(down-time.Millisecond)) || !h.Available(now.Add(down)) {
				t.Errorf("%+v: failure %d: not down for %v", v, i+1, down)
			}
			now = now.Add(down)
		}
	}
}

// TestOldRequestsShowNothing has many requests at a worker when it fails. Those that fail with it are one failure, and
// good answers to them heal nothing.
func TestOldRequestsShowNothing(t *testing.T) {
	var h Health
	if !h.Fail(epoch, epoch, 0, false) {
		t.Error("the first failure did not find the worker well")
	}
	old, now := epoch.Add(-time.Second), epoch.Add(firstDown)
	for i := range 20 {
		at := epoch.Add(time.Duration(i) * time.Second) // long requests end late
		if h.Fail(at, old, 0, false) || h.Succeed(at, old) {
			t.Error("healthy without a success")
		}
	}
	if !h.Available(now) {
		t.Error("failures of requests from before made the mark longer")
	}
	h.Admit(now)
	if h.Available(now) {
		t.Error("more than one request at a time")
	}
}

// TestWorkerIsLetBackByAndBy counts the requests that it gets at a time: one,
// and with each success twice as many, whatever it has from before.
func TestWorkerIsLetBackByAndBy(t *testing.T) {
	var h Health
	var before []uint64
	for range 200 {
		before = append(before, h.Admit(epoch))
	}
	h.Fail(epoch, epoch, 0, false)
	now := epoch.Add(firstDown)
	for want := 1; want < fullWindow; want *= 2 {
		var marks []uint64
		for h.Available(now) && len(marks) < 1000 {
			marks = append(marks, h.Admit(now))
		}
		if len(marks) != want {
			t.Fatalf("%d requests at a time, want %d", len(marks), want)
		}
		// the end of those from before makes no room
		h.Leave(before[0])
		if before = before[1:]; h.Available(now) {
			t.Error("a request from before made room for another")
		}
		for _, m := range marks {
			h.Leave(m)
		}
		if !h.Available(now) {
			t.Error("not available though none of its requests is left")
		}
		if well := h.Succeed(now, now); well != (2*want >= fullWindow) {
			t.Errorf("well after a success with %d at a time: %v", want, well)
		}
	}
	for range 10 * fullWindow {
		if !h.Available(now) {
			t.Fatal("a worker that is well is limited")
		}
		h.Admit(now)
	}
}

// TestWorkerThatAnswersIsLetBackWithTime has answers that take long, so that
// successes are few. Without one nothing grows.
func TestWorkerThatAnswersIsLetBackWithTime(t *testing.T) {
	var h Health
	room := func(now time.Time) (n int) {
		for h.Available(now) && n < 10*fullWindow {
			n++
			defer h.Leave(h.Admit(now))
		}
		return n
	}
	h.Fail(epoch, epoch, 0, false)
	now := epoch.Add(firstDown)
	if n := room(now.Add(time.Hour)); n != 1 {
		t.Errorf("%d requests at a time without a success, want 1", n)
	}
	h.Succeed(now, now)
	for i, want := range []int{2, 4, 8, 16, 10 * fullWindow} {
		if n := room(now.Add(time.Duration(i) * growAfter)); n != want {
			t.Errorf("%d requests at a time, %d s after a success, want %d", n, i, want)
		}
	}
	now = now.Add(4 * growAfter)
	if !h.Succeed(now, now) {
		t.Error("not well again with the next success")
	}
	h.Fail(now, now, 0, false)
	if n := room(now.Add(longestMark)); n != 1 {
		t.Errorf("%d requests at a time after another failure, want 1", n)
	}
}

// TestLongAnswerLetsOthersIn has an answer of minutes as the first one after a mark. It counts as good
// while it runs, unless the worker is silent.
func TestLongAnswerLetsOthersIn(t *testing.T) {
	for name, v := range map[string]struct {
		mark func(h *Health)
		want []int // requests at a time, by seconds after trialTime
	}{
		"failed":     {func(h *Health) { h.Fail(epoch, epoch, 0, false) }, []int{2, 4, 8, 16, 10 * fullWindow}},
		"hung":       {func(h *Health) { h.MarkHung(epoch) }, []int{1, 1, 1}},
		"unanswered": {func(h *Health) { h.Fail(epoch, epoch, 0, false); h.unanswered.Add(1) }, []int{1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			var h Health
			v.mark(&h)
			begun := epoch.Add(firstDown)
			first := h.Admit(begun)
			if h.Available(begun.Add(trialTime - 1)) {
				t.Error("a second request at once")
			}
			for i, want := range v.want {
				now := begun.Add(trialTime + time.Duration(i)*growAfter)
				for h.Available(now) && h.active < 10*fullWindow {
					h.Admit(now)
				}
				if h.active != want {
					t.Errorf("%d requests at a time, %d s later, want %d", h.active, i, want)
				}
			}
			for h.active > 0 {
				h.Leave(first)
			}
			if n := h.room(begun.Add(time.Hour)); n != 1 {
				t.Errorf("%d requests at a time after the end of all, want 1", n)
			}
		})
	}
}

// TestErrorsUnlikeThoseOfOthers has a worker answer with errors, beside another worker. The mark comes with the
// error that shows the worker to be ill.
func TestErrorsUnlikeThoseOfOthers(t *testing.T) {
	for name, v := range map[string]struct {
		before     int // good answers
		serverSide bool
		prompts    uint64        // that have errors in turn; 0: each its own
		pause      time.Duration // between errors
		good       int           // answers after each error
		others     int           // errors of the other worker for each ten of its answers
		ago        time.Duration // since those
		down       int           // the error that marks it down; 0: none of 100
	}{
		"only errors":                     {down: fewErrors},
		"of few prompts":                  {prompts: fewPrompts, down: fewErrors},
		"of fewer prompts":                {prompts: fewPrompts - 1},
		"of fewer prompts, server-side":   {prompts: fewPrompts - 1, serverSide: true},
		"after good answers":              {before: 20, down: 21},
		"after good answers, server-side": {before: 1000, serverSide: true, down: allErrors},
		"server-side, and others between": {before: 1000, serverSide: true, good: 1},
		"now and then":                    {pause: 3 * errorMemory},
		"now and then, server-side":       {pause: 3 * errorMemory, serverSide: true, down: allErrors},
		"after good ones, and forgotten":  {before: 1000, pause: errorMemory / 5, down: 28},
		"fewer than good ones":            {good: 2},
		"the other has some":              {others: 1, down: fewErrors},
		"the other has half":              {others: 5},
		"the other has as many":           {others: 10},
		"the other had as many long ago":  {others: 10, ago: 10 * time.Minute, down: fewErrors},
	} {
		w, other := New("test", Settings{Dial: "a:1"}), New("test", Settings{Dial: "b:1"})
		for i := range 100 {
			o := Outcome{Kind: OutcomeGood}
			if i%10 < v.others {
				o = Outcome{Kind: OutcomeErrored, CulpritKey: uint64(i), Peers: slices.Values([]*Worker{other})}
			}
			other.Record(epoch.Add(-v.ago), &o)
		}
		now, down := epoch, 0
		answer := func(n int) {
			for range n {
				w.Record(now, &Outcome{Kind: OutcomeGood})
			}
		}
		answer(v.before)
		for n := 1; n <= 100 && down == 0; n++ {
			o := Outcome{Kind: OutcomeErrored, ServerSide: v.serverSide, CulpritKey: uint64(n), Peers: slices.Values([]*Worker{w, other})}
			if v.prompts > 0 {
				o.CulpritKey %= v.prompts
			}
			if w.Record(now, &o).Down {
				down = n
			}
			answer(v.good)
			now = now.Add(v.pause)
		}
		if down != v.down {
			t.Errorf("%s: marked down by error %d, want %d", name, down, v.down)
		}
	}
}

// TestMissedWorkerIsWellWhenItAnswers breaks connections to a worker and restores them. A
// connection alone admits one request.
func TestMissedWorkerIsWellWhenItAnswers(t *testing.T) {
	var h Health
	if before, was := h.RecordAway(epoch, Refusing); before != ReachUnknown || !was || h.Available(epoch) {
		t.Errorf("missed: before %v, well before: %v, available: %v", before, was, h.Available(epoch))
	}
	at := epoch.Add(time.Second)
	if before, was := h.RecordAway(at, Refusing); before != Refusing || was || h.Available(at.Add(longestMark-1)) || !h.Available(at.Add(longestMark)) {
		t.Errorf("missed again: before %v, well before: %v", before, was)
	}
	if before := h.Connected(at); before != Refusing || !h.Available(at) || h.State(at).Window != 1 || h.State(at).Well {
		t.Errorf("connected: before %v, state %+v", before, h.State(at))
	}
	h.Admit(at)
	if h.Available(at) || h.Connected(at) != Unresponsive {
		t.Error("a connection let in more than one request")
	}
	if before, again := h.Answered(); before != Unresponsive || !again || !h.Available(at) || h.State(at).Fails != 0 {
		t.Errorf("met: before %v, well again: %v, state %+v", before, again, h.State(at))
	}
}

// TestOtherMarksOutliveAConnection has a worker fail requests, refuse connections, and accept
// them again. It gets requests again as after any failure. If none comes, the admin API shows
// the mark for a minute only.
func TestOtherMarksOutliveAConnection(t *testing.T) {
	var h Health
	h.Fail(epoch, epoch, 0, false)
	if _, was := h.RecordAway(epoch, Refusing); was {
		t.Error("a worker that is marked down was well")
	}
	over := epoch.Add(longestMark)
	if _, again := h.Answered(); again || h.Available(over.Add(-1)) || !h.Available(over) {
		t.Errorf("a connection made it well: %v", again)
	}
	if h.State(over.Add(idleMarkShown)).Well || !h.State(over.Add(idleMarkShown+1)).Well {
		t.Error("its mark is not shown for exactly a minute")
	}
}
