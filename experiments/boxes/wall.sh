#!/usr/bin/env bash
# `wall` on a box without network: the packed engine and harness, with the Python of the box ($WALL_PYTHON, else python3).
# Everything that is written stays in this folder: records in benchmarks/local, compiled kernels in cache.
set -euo pipefail
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
python=${WALL_PYTHON:-python3}

unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=$here/site:$here${PYTHONPATH:+:$PYTHONPATH} WALL_ROOT=$here WALL_CACHE=$here/cache
export VLLM_CACHE_ROOT=$here/cache/vllm TRITON_CACHE_DIR=$here/cache/triton TORCHINDUCTOR_CACHE_DIR=$here/cache/inductor
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false

# The last file of the archive: without it the packages are not whole.
if [ ! -f "$here/site/PACKED" ]; then
    echo "error: the engine is not here, or was not unpacked to its end" >&2
    echo "remedy: copy all engine parts here and run unpack.sh again" >&2
    exit 1
fi
if ! cmp -s "$here/site/PACKED" "$here/site/READY"; then
    "$python" -m inference_wall.box "$(head -n 1 "$here/site/PACKED")"
    echo "first use: compiling the packed Python files" >&2
    "$python" -m compileall -q -j 0 "$here/site" >/dev/null 2>&1 || true # some files are templates and do not compile
    cp "$here/site/PACKED" "$here/site/READY"
fi
exec "$python" -m inference_wall.cli "$@"
