#!/bin/sh
# Compares predictions before two of llm-d's simulators. go.mod names their version. They
# listen on all interfaces, so that everything runs in a network namespace: unshare and ip
# must be there, and the kernel must allow user namespaces. Run it from the top of the
# repository.
set -eu

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
GOWORK=off go build -C tests/live/llmdsim -o "$dir/sim" github.com/llm-d/llm-d-inference-sim/cmd/llm-d-inference-sim
go build -o "$dir/live" ./tests/live

cat > "$dir/inside" <<'EOF'
ip link set lo up
engine() {
	exec "$1/sim" --model tiny --port "800$2" --data-parallel-rank "$2" --force-dummy-tokenizer --enable-kvcache \
		--max-model-len 16384 --block-size 16 --kv-cache-size 6000 --zmq-endpoint "tcp://127.0.0.1:555$2" > "$1/sim$2.log" 2>&1
}
export POD_IP=127.0.0.1
for i in 0 1; do
	engine "$1" "$i" &
	eval "sim$i=$!"
	until curl -sf -o /dev/null "http://127.0.0.1:800$i/health"; do sleep 0.2; done
done
# The simulator connects to its subscriber: the router listens.
"$1/live" -engine llmdsim -engines 127.0.0.1:8000,127.0.0.1:8001 -events -directives '
worker 127.0.0.1:8000 {
	kv_events tcp://127.0.0.1:5550 {
		listen
	}
}
worker 127.0.0.1:8001 {
	kv_events tcp://127.0.0.1:5551 {
		listen
	}
}' && status=0 || status=$?
kill "$sim0" "$sim1"
exit $status
EOF
unshare --map-root-user --net sh "$dir/inside" "$dir"
