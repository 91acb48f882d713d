"""One run of TensorRT-LLM's ``LLM`` in a process of its own; ``wmtp trtllm check`` starts several.

Which arm it is, the environment says (``TRTLLM_WMTP_*``). The last line of output is JSON: tokens
per prompt, tokens per step where the release tells them, and seconds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
from time import perf_counter
from typing import Any


def accepted(cls: Any, **wanted: Any) -> dict[str, Any]:
    """Of ``wanted``, what ``cls`` takes; releases differ."""
    known = getattr(cls, "model_fields", None)
    if known is None:
        known = inspect.signature(cls).parameters
    return {name: value for name, value in wanted.items() if name in known}


def prompts(context: int, vocab_size: int, count: int = 3) -> list[list[int]]:
    """Prompts of ``context`` tokens and less, with repeats for a draft to find."""
    luck = random.Random(0)
    made = []
    for index in range(count):
        length = max(context >> index, 8)
        phrase = [luck.randrange(vocab_size) for _ in range(max(length // 4, 4))]
        made.append((phrase * 5)[:length])
    return made


def run(args: argparse.Namespace) -> dict[str, Any]:
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, MTPDecodingConfig

    # Early releases read the draft length under one name, later ones under the other, and each
    # sets the name that it does not read.
    length = args.draft_len
    names = accepted(MTPDecodingConfig, max_draft_len=length, num_nextn_predict_layers=length)
    llm = LLM(
        model=args.model,
        speculative_config=MTPDecodingConfig(**names),
        kv_cache_config=KvCacheConfig(enable_block_reuse=False, free_gpu_memory_fraction=0.5),
        cuda_graph_config=None
        if args.no_graphs
        else CudaGraphConfig(enable_padding=True, max_batch_size=4),
        max_batch_size=4,
        max_seq_len=args.context + args.max_tokens + 64,
        max_num_tokens=4096,
        enable_chunked_prefill=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tp,
    )
    sampling = SamplingParams(
        **accepted(
            SamplingParams,
            max_tokens=args.max_tokens,
            ignore_eos=True,
            end_id=-1,
            pad_id=0,
            top_k=1,
        )
    )
    begin = perf_counter()
    outputs = llm.generate(prompts(args.context, args.vocab_size), sampling)
    seconds = perf_counter() - begin
    llm.shutdown()
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "tokens_per_step": [getattr(one, "avg_decoded_tokens_per_iter", None) for one in outputs],
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--draft-len", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--no-graphs", action="store_true")
    args = parser.parse_args()
    # Before TensorRT-LLM looks models up: its workers import the same module by name.
    import tllm_wmtp.trtllm.plugin  # noqa: F401

    print("\n" + json.dumps(run(args)))


if __name__ == "__main__":  # workers start from this file
    main()
