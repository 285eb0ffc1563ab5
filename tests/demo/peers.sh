#!/bin/sh
# Runs the demo with smg, the successor of SGLang's gateway, and vllm-router as further contenders. It
# installs both from PyPI into a folder: PEERS, or one of the user's cache. Needs Linux, and python3
# with venv. Arguments go to the demo. Two cores are enough for one seed at a time:
#
#	tests/demo/peers.sh -seed 6281 -seeds 1
set -eu
cd "$(dirname "$0")/../.."
peers="${PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter-tools/peers}"
if [ ! -x "$peers/bin/smg" ]; then
	python3 -m venv "$peers"
	"$peers/bin/pip" install --quiet smg==1.13.0 vllm-router==0.1.17
fi
# Each takes a second port for its metrics, of another loopback address and below ephemeral ports.
metrics='--prometheus-host 127.0.0.2 --prometheus-port $(({port} - 10000))'
common="--host {host} --port {port} --worker-urls {upstreams} $metrics"
exec go run ./tests/demo \
	-with "smg cache_aware=$peers/bin/smg launch $common --policy cache_aware --log-level warn" \
	-with "vllm cache_aware=$peers/bin/vllm-router $common --policy cache_aware --log-level warning" \
	-with "vllm consistent=$peers/bin/vllm-router $common --policy consistent_hash --log-level warning" \
	"$@"
