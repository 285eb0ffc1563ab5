package engine

// Load is how many requests a data-parallel rank has.
type Load struct{ Running, Waiting int }

// Loads returns the load of each rank; none while the engine is killed.
func (e *Engine) Loads() (list []Load) {
	e.mu.Lock()
	l := e.life
	e.mu.Unlock()
	if l == nil {
		return nil
	}
	for _, k := range l.ranks {
		running, waiting, _ := k.load()
		list = append(list, Load{running, waiting})
	}
	return list
}

// loads answers as an SGLang does that is asked for its load. The tokens of requests in the
// queue count as if none were cached.
func (x *exchange) loads() {
	list := make([]any, 0, len(x.life.ranks))
	for i, k := range x.life.ranks {
		running, waiting, tokens := k.load()
		list = append(list, object{
			"dp_rank": i, "num_running_reqs": running, "num_waiting_reqs": waiting, "num_waiting_uncached_tokens": tokens,
			"max_running_requests": x.engine.cfg.MaxRunning,
		})
	}
	x.value(object{"timestamp": x.life.started, "version": version, "loads": list})
}
