#!/usr/bin/env bash
# Inside the vendor's container: builds and installs this project, then prints a verdict per feature.
#   smoke.sh [options of wmtp trtllm check]
# for example
#   smoke.sh                                         with the package's own small model
#   smoke.sh --model /models/Qwen3.6-35B-A3B --tp 2
#   smoke.sh --names-only
# Exit code 0: nothing failed; 1: something did; 2: no TensorRT-LLM here, or an option that is wrong.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
library=$work/cuda/lib/libwmtp_cuda.so
failed=0

verdict() {
    printf '%-8s  %s\n' "$1" "$2"
}

step() {
    local name=$1
    shift
    if "$@" >"$work/log" 2>&1; then
        verdict holds "$name"
        return 0
    fi
    failed=1
    verdict fails "$name"
    tail -n 5 "$work/log" | sed 's/^/          /'
    return 1
}

build_kernels() {
    cmake -S "$root" -B "$work/cuda" -DWMTP_CUDA=ON -DWMTP_PYTHON=OFF &&
        cmake --build "$work/cuda" -j
}

place_kernels() {
    cp "$library" "$(python3 -c 'import os, tllm_wmtp; print(os.path.dirname(tllm_wmtp.__file__))')"
}

# Not in the repository: there, its sources would hide the installed package.
cd / || exit 2
step "TensorRT-LLM is installed" python3 -c 'import tensorrt_llm' || exit 2
# Not the dependencies: the container's torch is the one that TensorRT-LLM was built against.
if ! step "the package builds" python3 -m pip install --no-deps "$root"; then
    verdict skipped "all else: there is no package"
    exit 1
fi
if step "the CUDA kernels build" build_kernels; then
    step "the kernels are where the package looks" place_kernels
else
    verdict skipped "the kernels are where the package looks"
fi
python3 -m tllm_wmtp.cli trtllm check "$@"
checked=$?
((checked > failed)) && failed=$checked
exit "$failed"
