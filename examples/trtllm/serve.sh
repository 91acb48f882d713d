#!/usr/bin/env bash
# Serves a checkpoint with a windowed MTP draft.
#   serve.sh CHECKPOINT LLM_ARGUMENTS.yaml [more options of trtllm-serve]
# for example
#   serve.sh /models/Qwen3.6-35B-A3B-1m qwen3.6-35b-a3b-1m.yaml
#   serve.sh /models/Qwen3.5-122B-A10B-1m qwen3.5-122b-a10b-1m.yaml --port 8001
#   serve.sh /models/Nemotron-3-Super-120B-A12B nemotron-3-super-120b-1m.yaml
set -euo pipefail

if [[ $# -lt 2 ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkpoint=$1
arguments=$2
shift 2
[[ -e $arguments ]] || arguments=$here/$arguments

export TRTLLM_WMTP_CONFIG=${TRTLLM_WMTP_CONFIG:-$here/wmtp.yaml}
option=--config
trtllm-serve serve --help 2>/dev/null | grep -q -- '--config' || option=--extra_llm_api_options
exec trtllm-serve serve "$checkpoint" \
    --custom_module_dirs "$here/wmtp_plugin" "$option" "$arguments" "$@"
