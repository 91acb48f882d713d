"""Who waits, who prefills, who decodes. Requests join and leave between steps."""

from __future__ import annotations

from collections import deque

import torch

from tllm_wmtp.executor.draft import Proposer
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.models.cache import PagedKvPool, RecurrentPool
from tllm_wmtp.models.states import PrefillStates


class Scheduler:
    """First come, first served.

    A request takes all it will ever need when it is admitted (pages for prompt, output and one
    step's drafts, a recurrent slot, a lane), so none is ever put out again.
    """

    def __init__(
        self,
        kv: PagedKvPool,
        recurrent: RecurrentPool,
        proposer: Proposer,
        device: torch.device,
    ):
        self.kv, self.recurrent, self.proposer, self.device = kv, recurrent, proposer, device
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def tokens_needed(self, request: Request) -> int:
        return len(request.prompt_ids) + request.max_tokens + self.proposer.rows

    def fits(self, request: Request) -> bool:
        """Whether an empty engine could hold it."""
        return self.kv.pages_for(self.tokens_needed(request)) <= self.kv.pages

    def enqueue(self, request: Request) -> None:
        self.waiting.append(request)

    def can_admit(self, request: Request) -> bool:
        pages = self.kv.pages_for(self.tokens_needed(request))
        return self.recurrent.free_slots > 0 and pages <= self.kv.free_pages

    def admit(self) -> None:
        """Lets waiting requests in, in order, as long as the next one finds room."""
        while self.waiting and self.can_admit(self.waiting[0]):
            self.start(self.waiting.popleft())

    def start(self, request: Request) -> None:
        request.slot = self.recurrent.acquire()
        request.pages = self.kv.acquire(self.tokens_needed(request))
        request.block_table = torch.tensor([request.pages], dtype=torch.int32, device=self.device)
        self.proposer.acquire(request)
        request.prefill_states = PrefillStates(
            self.kv, self.recurrent, request.block_table, request.slot
        )
        request.phase = Phase.PREFILL
        self.running.append(request)

    def retire(self) -> None:
        """Takes back what finished requests hold."""
        for request in [request for request in self.running if request.finished]:
            self.running.remove(request)
            self.proposer.release(request)
            self.kv.release(request.pages)
            if request.slot is not None:
                self.recurrent.release(request.slot)
            request.pages, request.slot = [], None
            request.block_table = request.prefill_states = request.draft_hidden = None
        self.waiting = deque(request for request in self.waiting if not request.finished)

    def next_prefill(self) -> Request | None:
        return next((r for r in self.running if r.phase is Phase.PREFILL), None)

    def decoding(self) -> list[Request]:
        return [r for r in self.running if r.phase is Phase.DECODE]
