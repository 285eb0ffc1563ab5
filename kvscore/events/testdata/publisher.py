"""An engine's KV event publisher on libzmq, driven by lines on standard input.

It does what vLLM's ZmqEventPublisher does: a PUB socket, a ROUTER socket that replays a
bounded buffer between two batches, and sequence numbers from 0. Each command is answered by
a line on standard output.

    publish N BYTES    publish N batches
    lose N BYTES       count and buffer N batches without publishing them
    restart            close the sockets, forget everything, and begin anew
    stop               end
"""

import argparse
import collections
import queue
import sys
import threading
import time

import zmq

END = b"\xff" * 8


class Publisher:
    def __init__(self, args):
        self.args = args
        self.context = zmq.Context()
        self.life = 0
        self.open()
        self.begin()

    def open(self):
        self.pub = self.context.socket(zmq.PUB)
        self.pub.setsockopt(zmq.SNDHWM, 100000)
        self.pub.setsockopt(zmq.LINGER, 0)
        if self.args.heartbeat:
            self.pub.setsockopt(zmq.HEARTBEAT_IVL, self.args.heartbeat)
            self.pub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * self.args.heartbeat)
            self.pub.setsockopt(zmq.HEARTBEAT_TTL, 4 * self.args.heartbeat)
        self.bind(self.pub, self.args.endpoint)
        self.args.endpoint = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.bind(self.router, self.args.replay)
        self.args.replay = self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    def bind(self, socket, endpoint):
        """Retries, because libzmq frees an address some time after close."""
        for _ in range(500):
            try:
                return socket.bind(endpoint)
            except zmq.ZMQError as e:
                if e.errno != zmq.EADDRINUSE:
                    raise
                time.sleep(0.01)
        raise TimeoutError(endpoint)

    def begin(self):
        self.seq = 0
        self.buffer = collections.deque(maxlen=self.args.steps)

    def publish(self, n, size, lost):
        topic = self.args.topic.encode()
        for _ in range(n):
            payload = f"life {self.life} batch {self.seq}".encode().ljust(size, b".")
            seq = self.seq.to_bytes(8, "big")
            if not lost:
                self.pub.send_multipart((topic, seq, payload))
            self.buffer.append((seq, payload))
            self.seq += 1

    def replay(self):
        frames = self.router.recv_multipart()
        if len(frames) != 3:
            return
        client, _, start = frames
        topic = [] if self.args.layout == "old" else [self.args.topic.encode()]
        for seq, payload in self.buffer:
            if int.from_bytes(seq, "big") >= int.from_bytes(start, "big"):
                self.router.send_multipart([client, b"", *topic, seq, payload])
        self.router.send_multipart([client, b"", *([b""] if topic else []), END, b""])

    def do(self, line):
        name, *numbers = line.split()
        if name in ("publish", "lose"):
            self.publish(int(numbers[0]), int(numbers[1]), name == "lose")
        elif name == "restart":
            self.pub.close()
            self.router.close()
            self.open()
            self.life += 1
            self.begin()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--replay", required=True)
    parser.add_argument("--topic", default="")
    parser.add_argument("--layout", choices=["old", "new"], default="new")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--heartbeat", type=int, default=0, help="milliseconds")
    p = Publisher(parser.parse_args())
    print(p.args.endpoint, p.args.replay, zmq.zmq_version(), flush=True)

    commands = queue.Queue()

    def read():
        for line in sys.stdin:
            commands.put(line.strip())
        commands.put("stop")

    threading.Thread(target=read, daemon=True).start()
    while True:
        if p.router.poll(0):
            p.replay()
        try:
            line = commands.get(timeout=0.02)
        except queue.Empty:
            continue
        if line == "stop":
            break
        p.do(line)
        print("done", flush=True)
    p.pub.close()
    p.router.close()
    p.context.term()


main()
