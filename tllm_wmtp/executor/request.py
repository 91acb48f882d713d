"""One request: what it asked for, where it stands, and what it holds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter

import torch

from tllm_wmtp.depth import AcceptanceEstimate
from tllm_wmtp.errors import WmtpError
from tllm_wmtp.executor.sampler import SamplingState
from tllm_wmtp.executor.text import OutputText
from tllm_wmtp.metrics import RequestMetrics
from tllm_wmtp.models.states import PrefillStates
from tllm_wmtp.ring import Lane
from tllm_wmtp.sampling import Logprobs, SamplingParams

log = logging.getLogger(__name__)


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass
class Update:
    """New output of a request; ``finish_reason`` ends the stream."""

    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


@dataclass(eq=False)
class Request:
    """State between steps.

    ``kv_length`` rows are committed in the target, so ``pending``, the last token made, stands at
    position ``kv_length`` and has not been fed yet. ``draft_tokens`` and ``draft_hidden [c, H]``
    are the last committed rows, and those that the draft has not seen are among them: row i is the
    hidden state at ``kv_length - c + i`` and the token after it. ``draft_fed`` says that the draft
    has seen them all.

    ``context_ids`` is what a prefill has to feed: the prompt, and after a preemption also all
    output but the pending token. ``restored_hidden [1, H]`` is that of the last row that a snapshot
    brought back, and ``reusable`` says whether snapshots of this request mean anything.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    sampling: SamplingState
    stop_ids: frozenset[int]
    max_tokens: int
    metrics: RequestMetrics
    text: OutputText | None = None
    on_update: Callable[[Update], None] | None = None
    acceptance: AcceptanceEstimate | None = None

    phase: Phase = Phase.WAITING
    finish_reason: str | None = None
    error: WmtpError | None = None
    output_ids: list[int] = field(default_factory=list)
    submitted_at: float = field(default_factory=perf_counter)

    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    lane: Lane | None = None
    prefill_states: PrefillStates | None = None

    context_ids: list[int] = field(init=False)
    restored_hidden: torch.Tensor | None = None
    reusable: bool = True
    prefilled: int = 0
    kv_length: int = 0
    pending: int = 0
    draft_tokens: list[int] = field(default_factory=list)
    draft_hidden: torch.Tensor | None = None
    draft_fed: bool = False
    _text_sent: int = 0

    def __post_init__(self) -> None:
        self.context_ids = self.prompt_ids

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    def advance(self, tokens: list[int]) -> None:
        """``tokens`` were chosen after as many rows, now committed."""
        self.kv_length += len(tokens)
        self.pending = tokens[-1]

    def count_to_end(self, tokens: list[int]) -> int:
        """How many of the next ``tokens`` it takes, up to one of its stop ids or its limit.

        A stop string is not looked for.
        """
        room = min(len(tokens), max(self.max_tokens - len(self.output_ids), 1))
        ends = (at + 1 for at in range(room) if tokens[at] in self.stop_ids)
        return next(ends, room)

    def suspend(self) -> None:
        """Back to the line, with nothing committed; a prefill of ``context_ids`` restores all."""
        self.context_ids = self.prompt_ids + self.output_ids[:-1]
        self.prefilled = self.kv_length = 0
        self.phase = Phase.WAITING
        self.metrics.preemptions += 1

    def emit(self, tokens: list[int], logprobs: Logprobs | None = None) -> None:
        """Gives out ``tokens`` one by one, as far as no stop condition cuts them off.

        ``logprobs`` has one entry per token if the request asked for them.
        """
        if self.finished:
            return
        self.sampling.commit(tokens)
        reason, count = None, 0
        while reason is None and count < len(tokens):
            self.output_ids.append(tokens[count])
            reason = self._reason_to_stop(tokens[count])
            count += 1
        self._send(tokens[:count], reason, None if logprobs is None else logprobs[:count])

    def finish(self, reason: str, error: WmtpError | None = None) -> None:
        """Ends the request without a new token."""
        if not self.finished:
            self.error = error
            self._send([], reason)

    def _reason_to_stop(self, token: int) -> str | None:
        if token in self.stop_ids:
            return "stop"
        if self.text is not None and self.text.push(token):
            return "stop"
        if len(self.output_ids) < self.max_tokens:
            return None
        return "stop" if self.text is not None and self.text.finish() else "length"

    def _send(
        self, tokens: list[int], reason: str | None, logprobs: Logprobs | None = None
    ) -> None:
        self.metrics.output_tokens = len(self.output_ids)
        text = ""
        if self.text is not None:
            if reason is not None:
                self.text.finish()
            whole = self.text.text if reason is not None else self.text.settled()
            text, self._text_sent = whole[self._text_sent :], len(whole)
        if reason is not None:
            self.phase, self.finish_reason = Phase.FINISHED, reason
        tell = self.on_update
        if tell is None:
            return
        if reason is not None:
            # Told for the last time, the consumer may go, and an LLM that only it keeps alive: not
            # when the engine has done with the request, and not by the garbage collector.
            self.on_update = None
        try:
            tell(Update(tokens, text, reason, logprobs))
        except Exception:
            # A consumer that fails loses its own stream; the batch it was served in goes on.
            log.exception("request %d: its consumer failed and is told no more", self.request_id)
            self.on_update = None
            if not self.finished:
                self.phase, self.finish_reason = Phase.FINISHED, "abort"
