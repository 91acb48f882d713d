"""``LLM`` of the stand-in: one process, greedy, on the toy executor."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import common


class LLM:
    def __init__(
        self,
        model: str,
        speculative_config: Any = None,
        kv_cache_config: Any = None,
        cuda_graph_config: Any = None,
        max_batch_size: int = 8,
        max_seq_len: int | None = None,
        max_num_tokens: int = 8192,
        enable_chunked_prefill: bool = False,
        skip_tokenizer_init: bool = False,
        disable_overlap_scheduler: bool = False,
        tensor_parallel_size: int = 1,
    ):
        creator = importlib.import_module("tensorrt_llm._torch.pyexecutor.py_executor_creator")
        text = json.loads((Path(model) / "config.json").read_text())
        cls = common.model_class(text["architectures"][0])
        built = cls(common.model_config(model, speculative_config))
        padding = bool(cuda_graph_config and cuda_graph_config.enable_padding)
        chunk = 16 if enable_chunked_prefill else 4096
        engine = common.engine_of(
            built, max_batch_size, chunk, padding, cuda_graph_config=cuda_graph_config
        )
        self.executor = creator.create_py_executor(engine)

    def generate(
        self, inputs: str | Sequence[list[int]], sampling_params: common.SamplingParams
    ) -> Any:
        """A text's tokens are its bytes; text is made of token numbers."""
        if isinstance(inputs, str):
            return self.generate([[one % 97 for one in inputs.encode()]], sampling_params)[0]
        requests = [
            common.Request(index + 1, list(prompt), sampling_params.max_tokens)
            for index, prompt in enumerate(inputs)
        ]
        for _ in self.executor.run(requests):
            pass
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(token_ids=one.output, text=" ".join(map(str, one.output)))
                ],
                avg_decoded_tokens_per_iter=len(one.output) / max(one.steps, 1),
            )
            for one in requests
        ]

    def shutdown(self) -> None:
        pass
