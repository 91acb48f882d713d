"""The windowed draft with TensorRT-LLM's Python interface.

python generate.py CHECKPOINT "a prompt" [--tp 2]
"""

import argparse

from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import KvCacheConfig, MTPDecodingConfig

import tllm_wmtp.trtllm.plugin  # noqa: F401  (registers the models; before LLM is made)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("prompt")
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    llm = LLM(
        model=args.checkpoint,
        tensor_parallel_size=args.tp,
        speculative_config=MTPDecodingConfig(max_draft_len=6, num_nextn_predict_layers=6),
        kv_cache_config=KvCacheConfig(enable_block_reuse=False),
        max_batch_size=4,
        enable_chunked_prefill=True,
    )
    output = llm.generate(args.prompt, SamplingParams(max_tokens=128))
    print(output.outputs[0].text)


if __name__ == "__main__":  # workers of a multi-GPU run start from this file
    main()
