"""A target behind its pools, driven by hand."""

from __future__ import annotations

import torch

from tllm_wmtp.checkpoint.loader import LoadedModel
from tllm_wmtp.models.cache import BlockTables, PagedKvPool, RecurrentPool
from tllm_wmtp.models.states import PrefillStates, VerifyStates

ROWS = 7


class Harness:
    """Our target behind pools, driven by hand: prefill in chunks, verify rows, commit."""

    def __init__(self, model: LoadedModel, prompts: list[list[int]], page: int = 16):
        self.model, self.device = model, torch.device("cpu")
        caches = model.config.caches
        self.kv = PagedKvPool(caches, 64, page, torch.float32, self.device)
        for pages in (*self.kv.k_pages, *self.kv.v_pages):
            pages.fill_(float("nan"))  # what nobody wrote must not be read
        self.recurrent = RecurrentPool(caches, 4, torch.float32, self.device)
        self.kv.acquire(1)  # so that page and slot numbers are not all zero
        self.recurrent.acquire()
        self.sequences = [list(prompt) for prompt in prompts]
        self.slots = [self.recurrent.acquire() for _ in prompts]
        pages = self.kv.pages_for(160)
        self.tables = BlockTables(4, pages, self.device)
        for slot in self.slots:
            self.tables.write(slot, 0, self.kv.acquire(pages))
        self.states = VerifyStates(self.kv, self.recurrent, self.tables, self.slots, ROWS)

    @torch.inference_mode()
    def prefill(self, chunk: int) -> list[torch.Tensor]:
        """Logits of every prompt row, per request."""
        logits = []
        for index, tokens in enumerate(self.sequences):
            slot = self.slots[index]
            states = PrefillStates(self.kv, self.recurrent, self.tables.row(slot), slot)
            parts = []
            for start in range(0, len(tokens), chunk):
                ids = torch.tensor([tokens[start : start + chunk]])
                states.begin(start, ids.shape[1], None)
                hidden = self.model.target(ids, states.positions, states)
                parts.append(self.model.target.logits(hidden)[0])
            logits.append(torch.cat(parts))
        return logits

    @torch.inference_mode()
    def verify(self, rows: list[list[int]]) -> torch.Tensor:
        self.states.begin([len(tokens) for tokens in self.sequences])
        hidden = self.model.target(torch.tensor(rows), self.states.positions, self.states)
        return self.model.target.logits(hidden)

    @torch.inference_mode()
    def commit(self, rows: list[list[int]], counts: list[int]) -> None:
        self.states.commit(torch.tensor(counts))
        for tokens, fed, count in zip(self.sequences, rows, counts, strict=True):
            tokens += fed[:count]

    def recurrent_states(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        slot = self.slots[index]
        return self.recurrent.conv[:, slot].clone(), self.recurrent.state[:, slot].clone()
