"""The embedded runtime's proposer beside a stand-in executor: same rows, its own ring and loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vendor_stub import common

from tllm_wmtp.config import MtpConfig
from tllm_wmtp.executor.draft import MtpProposer


class Oracle:
    """Tells what the windowed draft must propose after each of an executor's steps."""

    def __init__(self, executor: Any, window: int, n_sink: int, lanes: int):
        loaded = executor.model.model_config.extra_attrs["loaded"]
        config = MtpConfig(executor.drafts + 1, window, n_sink)
        self.proposer = MtpProposer(
            loaded.target, loaded.head, config, lanes, torch.float32, torch.device("cpu")
        )
        self.depth = executor.drafts
        self.hidden = torch.empty(0)
        executor.model.model.register_forward_hook(self._record)
        self.requests: dict[int, Any] = {}

    def _record(self, _: Any, __: Any, output: torch.Tensor) -> None:
        self.hidden = output

    def expected(self, batch: list[common.Request], result: dict[str, Any]) -> dict[int, list[int]]:
        """Drafts per request whose prompt is done, from the accepted tokens of ``result``."""
        drafts, row = {}, 0
        for index, (one, length) in enumerate(zip(batch, result["lengths"], strict=False)):
            hidden = self.hidden[row : row + length]
            row += length
            mine = self.requests.get(one.request_id) or self._join(one)
            count = int(result["new_tokens_lens"][index])
            tokens = result["new_tokens"][index, :count].tolist()
            if index < result["contexts"]:
                self.proposer.store(mine, mine.stored, hidden)
                mine.stored += length
                if mine.stored < len(one.prompt):
                    continue
                mine.kv_length = mine.stored
                hidden = hidden[-1:]
            else:
                mine.kv_length += count
            mine.draft_tokens, mine.draft_hidden = tokens, hidden[:count]
            sampler: Any = SimpleNamespace(draft=lambda logits: logits.argmax(-1))
            drafted = self.proposer.propose([mine], self.depth, sampler).tokens[0]
            drafts[one.request_id] = drafted.tolist()
        return drafts

    def leave(self, alive: set[int]) -> None:
        """Requests that are no longer alive give their lanes back, spoiled."""
        for request_id in set(self.requests) - alive:
            self.proposer.release(self.requests.pop(request_id))

    def _join(self, one: common.Request) -> Any:
        mine = SimpleNamespace(
            context_ids=one.prompt,
            lane=None,
            stored=0,
            kv_length=0,
            draft_tokens=[],
            draft_hidden=None,
            draft_fed=False,
            metrics=SimpleNamespace(prefill_draft_rows=0),
        )
        self.proposer.acquire(mine)
        self.requests[one.request_id] = mine
        return mine
