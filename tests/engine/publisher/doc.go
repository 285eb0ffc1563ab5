// Package publisher publishes the KV events of one rank of a simulated engine, as vLLM,
// SGLang and TensorRT-LLM do. Batches in msgpack go out on a ZeroMQ PUB socket. A ROUTER
// socket answers with past batches. Faults on demand lose and delay batches, and close
// connections. The package knows no cache and no request.
//
// It speaks ZMTP 3.1 itself, because the sockets of github.com/go-zeromq/zmq4 v0.17.0 are
// not fit for a server:
//
//   - The PUB socket answers no PING. After ten of them it reads nothing more.
//   - One slow subscriber stops all others.
//   - A client that sends no greeting stops the accept loop.
//   - The caller cannot close a single connection.
//   - Close leaves a goroutine.
//
// Beyond its high-water mark a subscriber loses messages, as with ZeroMQ.
package publisher
