"""Who waits, who prefills, who decodes. Requests join and leave between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tllm_wmtp.executor.draft import Proposer
from tllm_wmtp.executor.prefix import PrefixCache, Snapshot
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.models.cache import BlockTables, PagedKvPool, RecurrentPool
from tllm_wmtp.models.states import PrefillStates


class Scheduler:
    """First come, first served.

    A request is admitted with a recurrent slot, a lane, and pages for its context and one step's
    rows; before each later step it takes the pages that this step may fill. When none are left,
    snapshots of earlier requests give way; then the request admitted last gives up all it holds and
    goes back to the front of the line, to return by a prefill of what it knew. The oldest is never
    put back, so some request always ends.
    """

    def __init__(
        self,
        kv: PagedKvPool,
        tables: BlockTables,
        recurrent: RecurrentPool,
        proposer: Proposer,
        prefixes: PrefixCache,
    ):
        self.kv, self.tables, self.recurrent, self.proposer = kv, tables, recurrent, proposer
        self.prefixes = prefixes
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

    def can_admit(self, request: Request, prefix: Snapshot | None = None) -> bool:
        """Whether there is room for it, after the rows of ``prefix``; snapshots may give way."""
        if self.recurrent.free_slots == 0 or not self.proposer.can_acquire():
            return False
        # A page is left for each running request: one that is let in only to be put back by the
        # next growth would have prefilled for nothing.
        pages = self.kv.pages_for(self._tokens_at_admission(request)) + len(self.running)
        shared = 0 if prefix is None else prefix.length // self.kv.tokens_per_page
        return self.prefixes.make_room(pages - shared, spared=prefix)

    def admit(self) -> None:
        """Lets waiting requests in, in order, as long as the next one finds room."""
        while self.waiting and self.recurrent.free_slots > 0:
            request = self.waiting[0]
            prefix = self.prefixes.find(request.context_ids)
            if not self.can_admit(request, prefix):
                # A snapshot may take up the very page that its own request lacks.
                if prefix is None or not self.can_admit(request):
                    return
                prefix = None
            self.start(self.waiting.popleft(), prefix)

    def start(self, request: Request, prefix: Snapshot | None = None) -> None:
        """Runs a request for which :meth:`can_admit` found room."""
        request.slot = self.recurrent.acquire()
        self.proposer.acquire(request)
        self.running.append(request)
        if prefix is not None:
            self.prefixes.restore(request, prefix)
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
        self.retire()
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
        if request.slot is None or not self.prefixes.make_room(missing):
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
        request.prefill_states = request.draft_hidden = request.restored_hidden = None
