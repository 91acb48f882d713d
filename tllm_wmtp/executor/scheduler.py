"""Who waits, who prefills, who decodes. Requests join and leave between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tllm_wmtp.executor.draft import Proposer
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.models.cache import BlockTables, PagedKvPool, RecurrentPool
from tllm_wmtp.models.states import PrefillStates


class Scheduler:
    """First come, first served.

    A request is admitted with a recurrent slot, a lane, and pages for its context and one step's
    rows; before each later step it takes the pages that this step may fill. When none are left, the
    request admitted last gives up all it holds and goes back to the front of the line, to return
    by a prefill of what it knew. The oldest is never put back, so some request always ends.
    """

    def __init__(
        self,
        kv: PagedKvPool,
        tables: BlockTables,
        recurrent: RecurrentPool,
        proposer: Proposer,
    ):
        self.kv, self.tables, self.recurrent, self.proposer = kv, tables, recurrent, proposer
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission

    def tokens_needed(self, request: Request) -> int:
        """Rows at its longest: prompt, output, and what the last step feeds beyond it."""
        return len(request.prompt_ids) + request.max_tokens + self.proposer.rows

    def fits(self, request: Request) -> bool:
        """Whether an empty engine could hold it to its end."""
        return self.kv.pages_for(self.tokens_needed(request)) <= self.kv.pages

    def enqueue(self, request: Request) -> None:
        self.waiting.append(request)

    def can_admit(self, request: Request) -> bool:
        if self.recurrent.free_slots == 0 or not self.proposer.can_acquire():
            return False
        # A page is left for each running request: one that is let in only to be put back by the
        # next growth would have prefilled for nothing.
        pages = self.kv.pages_for(self._tokens_at_admission(request)) + len(self.running)
        return pages <= self.kv.free_pages

    def admit(self) -> None:
        """Lets waiting requests in, in order, as long as the next one finds room."""
        while self.waiting and self.can_admit(self.waiting[0]):
            self.start(self.waiting.popleft())

    def start(self, request: Request) -> None:
        request.slot = self.recurrent.acquire()
        self.proposer.acquire(request)
        self.running.append(request)
        self._grow(request, self._tokens_at_admission(request))
        request.prefill_states = PrefillStates(
            self.kv, self.recurrent, self.tables.row(request.slot), request.slot
        )
        request.phase = Phase.PREFILL

    def reserve(self, requests: Iterable[Request], rows: int) -> list[Request]:
        """Pages for a step that feeds ``rows`` rows to each of ``requests``.

        Args:
            requests: in the order of admission.

        Returns:
            those of them that take the step; the others were put back to make room.
        """
        return [
            request
            for request in requests
            if request.phase is Phase.DECODE and self._make_room(request, rows)
        ]

    def preempt(self, request: Request) -> None:
        """Puts a running request back to the front of the line, without losing what it made."""
        self._take_back(request)
        request.suspend()
        self.waiting.appendleft(request)

    def retire(self) -> None:
        """Takes back what finished requests hold."""
        for request in [request for request in self.running if request.finished]:
            self._take_back(request)
        if any(request.finished for request in self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.finished)

    def next_prefill(self) -> Request | None:
        return next((r for r in self.running if r.phase is Phase.PREFILL), None)

    def decoding(self) -> list[Request]:
        return [r for r in self.running if r.phase is Phase.DECODE]

    def _tokens_at_admission(self, request: Request) -> int:
        return len(request.context_ids) + self.proposer.rows

    def _make_room(self, request: Request, rows: int) -> bool:
        """Grows it by ``rows``, at the expense of those admitted later; False if it had to go."""
        tokens = request.kv_length + rows
        while not self._grow(request, tokens):
            self.retire()
            if self._grow(request, tokens):
                break
            if self.running == [request]:
                raise RuntimeError(f"{tokens} tokens do not fit the KV pool; fits() let them in")
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is request:
                return False
        return True

    def _grow(self, request: Request, tokens: int) -> bool:
        """Gives it pages for ``tokens`` tokens, or changes nothing if there are too few."""
        held = len(request.pages)
        missing = self.kv.pages_for(tokens) - held
        if missing <= 0:
            return True
        if missing > self.kv.free_pages or request.slot is None:
            return False
        pages = self.kv.acquire(missing)
        self.tables.write(request.slot, held, pages)
        request.pages += pages
        return True

    def _take_back(self, request: Request) -> None:
        self.running.remove(request)
        self.proposer.release(request)
        self.kv.release(request.pages)
        if request.slot is not None:
            self.tables.clear(request.slot)
            self.recurrent.release(request.slot)
        request.pages, request.slot = [], None
        request.prefill_states = request.draft_hidden = None
