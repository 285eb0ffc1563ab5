package pool

import (
	"context"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// Closer closes the sessions that engines keep for the router. It lives as long as the pool.
type Closer interface {
	// Ended gets an engine-backed binding that has ended, other than by Unbind.
	Ended(key affinity.Key, of *affinity.Want, why affinity.Reason)
	// Close has the engine of the target close a session.
	Close(of *affinity.Want)
	// Closes returns whether a session of an id is left to be closed on a worker.
	Closes(w *worker.Worker, id string) bool
	// Await waits until no session of an id is left to be closed on a worker.
	Await(ctx context.Context, w *worker.Worker, id string) error
	// CloseAll closes all sessions that engines still keep, for the pool ends.
	CloseAll()
}
