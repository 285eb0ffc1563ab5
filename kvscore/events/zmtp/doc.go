// Package zmtp is a client of the ZeroMQ Message Transport Protocol (ZMTP) for KV event
// streams. It has SUB and DEALER sockets that dial.
//
// It talks to peers of ZMTP 3.0 and 3.1 over tcp:// and ipc:// with the NULL mechanism, which
// neither authenticates nor encrypts. It does not reconnect and queues nothing: a [Conn] is
// one connection, and its owner decides what a lost one means.
//
// The protocol is at https://rfc.zeromq.org/spec/37/ (3.1) and https://rfc.zeromq.org/spec/23/
// (3.0).
//
// The code is our own, because the pure Go library, go-zeromq/zmq4 v0.17.0, lacks what a
// stream of untrusted length needs:
//
//   - It allocates as much as a frame's header announces. Nine bytes from a peer can thus end
//     the process.
//   - Its SUB socket sends no PING. It answers none, but passes it on as a message.
//   - It announces ZMTP 3.0 only.
//   - It waits without a deadline for a handshake and for a silent peer.
//   - Close leaves the reading goroutine behind if nobody takes the received messages.
package zmtp
