"""All completions under way: one LLM, a limit, and what is counted when they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tllm_wmtp.errors import WmtpError
from tllm_wmtp.llm import LLM, Prompt, RequestHandle
from tllm_wmtp.outputs import RequestOutput
from tllm_wmtp.sampling import Logprobs, SamplingParams
from tllm_wmtp.serving.openai.errors import HttpError
from tllm_wmtp.serving.openai.metrics import ServerMetrics

log = logging.getLogger(__name__)

#: Seconds after which a client that was refused may try again.
RETRY_AFTER_S = 1


@dataclass(frozen=True)
class Piece:
    """What is new of one completion; either ``finish_reason`` or ``error`` ends it."""

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    error: HttpError | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Batch:
    """The completions of one HTTP request; iterating yields their pieces as they come.

    ``prompt_tokens`` and ``cached_tokens`` (those that were not computed again) are those of each
    completion, 0 until its first piece.
    """

    def __init__(self, size: int):
        self.prompt_tokens, self.cached_tokens = [0] * size, [0] * size
        self.output_tokens = [0] * size
        self.ended = False
        #: Whether nobody reads it any more, and how many of its completions have ended.
        self.forgotten, self.finished = False, 0
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._running = size
        self._handles: list[RequestHandle] = []

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while self._running:
            piece = await self._pieces.get()
            self._running -= piece.last
            yield piece

    def end(self) -> None:
        """Gives back what the completions hold; those that have ended stay as they are."""
        self.ended = True
        for handle in self._handles:
            handle.abort()

    def hold(self, handle: RequestHandle) -> None:
        self._handles.append(handle)
        if self.ended:
            handle.abort()

    def add(self, index: int, output: RequestOutput) -> None:
        """Takes a copy of what is new: the next output of a handle replaces it."""
        completion, metrics = output.outputs[0], output.metrics
        self.prompt_tokens[index] = len(output.prompt_token_ids)
        self.output_tokens[index] = len(completion.token_ids)
        if metrics is not None:
            self.cached_tokens[index] = min(metrics.prefix_hit_tokens, metrics.prompt_tokens)
        reason, error = completion.finish_reason, None
        if reason == "error":
            # Without metrics the engine has refused it: it is the request that is wrong.
            error = HttpError(400 if metrics is None else 500, output.error or "failed")
        elif reason == "abort":
            error = stopping()
        self.put(
            Piece(
                index,
                completion.text_diff,
                tuple(completion.token_ids_diff),
                completion.logprobs_diff,
                None if error is not None else reason,
                error,
            )
        )

    def put(self, piece: Piece) -> None:
        self._pieces.put_nowait(piece)


class Service:
    """Used from one event loop.

    A completion keeps its place until the engine has nothing of it left and nobody waits for its
    answer: a client that does not fetch it keeps others from theirs, not the server's memory.

    Args:
        llm: the caller shuts it down, after the loop's end.
        most: completions under way; further ones are refused.
    """

    def __init__(self, llm: LLM, most: int, metrics: ServerMetrics):
        self._llm, self._most, self._metrics = llm, most, metrics
        self._taken = 0
        self._batches: set[Batch] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking = asyncio.Lock()
        #: Set when the server is to stop: nothing new is begun.
        self.draining = False

    def take(self, places: int, total: int | None = None) -> None:
        """Takes places for as many completions, which :meth:`start` fills, or :meth:`free`.

        Args:
            total: of the whole request, if it holds some already.

        Raises:
            HttpError: there are not that many now, or never.
        """
        if self.draining:
            raise stopping()
        if (total or places) > self._most:
            raise HttpError(
                400,
                WmtpError(
                    f"{total or places} completions in one request",
                    f"this server makes at most {self._most} at a time",
                    "send fewer prompts per request, or raise --max-concurrent",
                ),
            )
        if self._taken + places > self._most:
            raise HttpError(
                429,
                WmtpError(
                    f"{places} more besides {self._taken} completions",
                    f"{self._most} may run and wait at the same time",
                    "send it again later, or raise --max-concurrent",
                ),
                code="rate_limit_exceeded",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self._taken += places

    def free(self, places: int) -> None:
        self._taken -= places

    def start(self, work: Sequence[tuple[Prompt, SamplingParams]]) -> Batch:
        """Begins completions whose places are taken, and returns at once."""
        batch = Batch(len(work))
        self._batches.add(batch)
        tasks = [
            asyncio.create_task(self._follow(batch, index, prompt, params))
            for index, (prompt, params) in enumerate(work)
        ]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        return batch

    def forget(self, batch: Batch) -> None:
        """Nobody reads a batch any more: what still runs of it is ended."""
        batch.end()
        self._batches.discard(batch)
        if not batch.forgotten:
            batch.forgotten = True
            self.free(batch.finished)

    def end_all(self) -> None:
        for batch in self._batches:
            batch.end()

    async def exposition(self) -> bytes:
        """The metrics; the engine answers between two steps, which others need not wait for."""
        async with self._asking:
            usage = await asyncio.to_thread(self._llm.usage)
        return self._metrics.exposition(usage)

    async def _follow(
        self, batch: Batch, index: int, prompt: Prompt, params: SamplingParams
    ) -> None:
        """One completion, to its end even if nobody reads it."""
        output: RequestOutput | None = None
        try:
            # A long prompt takes its time to tokenize; the other streams do not wait for it.
            handle = await asyncio.to_thread(self._llm.generate_async, prompt, params)
            batch.hold(handle)
            async for output in handle:
                batch.add(index, output)
        except WmtpError as error:  # the engine has been shut down
            batch.put(Piece(index, error=HttpError(503, error)))
        except Exception as error:
            log.exception("a completion failed; the others go on")
            batch.end()
            batch.put(Piece(index, error=HttpError(500, f"{type(error).__name__}: {error}")))
        finally:
            batch.finished += 1
            if batch.forgotten:
                self.free(1)
            reason = None if output is None else output.outputs[0].finish_reason
            self._metrics.count(reason or "error", None if output is None else output.metrics)


def stopping() -> HttpError:
    return HttpError(
        503,
        WmtpError("this server", "it is shutting down", "send the request to another, or later"),
        code="shutting_down",
    )
