#!/usr/bin/env bash
# Inside the vendor's container: builds and installs this project, then prints a verdict per feature.
#   examples/trtllm/smoke.sh [CHECKPOINT]
# Without a checkpoint, names and signatures are probed and the kernels tested, and no model runs.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root" || exit 2
failed=0

step() {
    local name=$1
    shift
    if "$@" >/tmp/wmtp-smoke.log 2>&1; then
        printf '%-8s  %s\n' holds "$name"
    else
        failed=1
        printf '%-8s  %s\n' fails "$name"
        tail -n 5 /tmp/wmtp-smoke.log | sed 's/^/          /'
    fi
}

step "TensorRT-LLM is installed" python3 -c 'import tensorrt_llm'
# Not the dependencies: the container's torch is the one that TensorRT-LLM was built against.
step "the package builds" python3 -m pip install --no-deps .
step "the CUDA kernels build" bash -c \
    'cmake -S . -B build/cuda -DWMTP_CUDA=ON -DWMTP_PYTHON=OFF && cmake --build build/cuda -j'
if [[ -f build/cuda/lib/libwmtp_cuda.so ]]; then
    step "the kernels are where the package looks" bash -c \
        'cd / && cp "$0" "$(python3 -c "import tllm_wmtp, os; print(os.path.dirname(tllm_wmtp.__file__))")"' \
        "$root/build/cuda/lib/libwmtp_cuda.so"
fi
cd / || exit 2
options=()
[[ $# -ge 1 ]] && options=(--model "$1")
python3 -m tllm_wmtp.cli trtllm check "${options[@]}" || failed=1
exit $failed
