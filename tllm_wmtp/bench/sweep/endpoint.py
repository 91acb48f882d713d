"""A server as a target: batches of concurrent streams, timed by their clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tllm_wmtp.bench.inputs import Prompt
from tllm_wmtp.bench.sweep.cells import Cell, TargetConfig
from tllm_wmtp.bench.sweep.embedded import make_prompts
from tllm_wmtp.bench.sweep.streams import Stream, iterations
from tllm_wmtp.bench.sweep.target import Advance, Measured, Result
from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Far from the seeds of a suite.
UNUSED_SEED = 1_000_003
#: Values that no client can see.
UNSEEN = {
    **dict.fromkeys(
        ("draft_ms", "verify_ms", "ctx_ms", "fwd_ms"), "a client sees whole steps only"
    ),
    "draft_kv_bytes": "the server does not report its memory",
    **dict.fromkeys(
        ("bytes_moved", "floor_ms", "fraction_of_floor", "read_bandwidth_gb_per_s"),
        "the server's weights and memory are not known to the client",
    ),
}
NO_HISTOGRAM = "the server reports no accepted drafts, and a piece may hold several steps"


class Client(Protocol):
    """One kind of server."""

    def check(self) -> None:
        """
        Raises:
            WmtpError: the server does not answer, or does not have the model.
        """
        ...

    def ask(self, cell: Cell, prompt: Prompt, seed: int) -> Stream:
        """One request, to its end.

        Raises:
            WmtpError: the server refuses it, or the connection ends.
        """
        ...


class EndpointTarget:
    """Args:
    directories: checkpoint of each model that a cell names, for its tokenizer.
    """

    def __init__(self, config: TargetConfig, directories: Mapping[str, Path]):
        self._config, self._directories = config, directories
        self._tokenizers: dict[str, Tokenizer] = {}

    def prepare(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            if cell.model not in self._tokenizers:
                tokenizer = CheckpointDirectory(self._directories[cell.model]).tokenizer()
                if tokenizer is None:
                    raise CheckpointError(
                        f"model {cell.model!r}",
                        "it has no tokenizer.json, and prompts are made of text",
                        "name the directory with the tokenizer of the served model",
                    )
                self._tokenizers[cell.model] = tokenizer
        self._client(cells[0]).check()

    def run(self, cells: Sequence[Cell], advance: Advance) -> Generator[Result, None, None]:
        warm = False
        for cell in cells:
            try:
                client = self._client(cell)
                prompts = make_prompts(cell, self._tokenizers[cell.model])
                if not warm:
                    self._warm_up(client, cell)
                    warm = True
                streams, found = [], []
                for wave in range(cell.repeats):
                    answered = ask_together(client, cell, prompts, wave)
                    streams += answered
                    found += iterations(answered)
                    advance(cell.prefill_cost + cell.decode_cost)
                answers = [stream.answer() for stream in streams]
                measured = Measured(prompts, answers, found, missing=reasons(streams))
            except Exception as error:
                yield cell, error
            else:
                yield cell, measured

    def _warm_up(self, client: Client, cell: Cell) -> None:
        """A prompt that no cell has: the first measured one does not pay for first calls, and finds
        nothing of its own in the server's caches."""
        other = replace(cell, seed=cell.seed + UNUSED_SEED, repeats=1, batch=1)
        client.ask(other, make_prompts(other, self._tokenizers[cell.model])[0], other.seed)

    def _client(self, cell: Cell) -> Client:
        tokenizer = self._tokenizers[cell.model]
        if self._config.kind == "openai":
            from tllm_wmtp.bench.sweep.openai_client import OpenAiClient

            return OpenAiClient(self._config, tokenizer)
        from tllm_wmtp.bench.sweep.triton_client import TritonClient

        return TritonClient(self._config, tokenizer)


def ask_together(client: Client, cell: Cell, prompts: Sequence[Prompt], wave: int) -> list[Stream]:
    """One batch of requests, sent at the same time; the first error of one is that of all."""
    first = wave * cell.batch
    start = threading.Barrier(cell.batch)

    def ask(index: int) -> Stream:
        start.wait()
        return client.ask(cell, prompts[index], cell.seed + index)

    with ThreadPoolExecutor(cell.batch) as pool:
        futures = [pool.submit(ask, first + index) for index in range(cell.batch)]
        return [future.result() for future in futures]


def reasons(streams: Sequence[Stream]) -> dict[str, str]:
    """Why a row of these streams lacks what it lacks."""
    missing = dict(UNSEEN)
    if any(stream.histogram is None for stream in streams):
        missing |= {"accepted_histogram": NO_HISTOGRAM, "alpha": NO_HISTOGRAM}
    if any(stream.token_ids is None for stream in streams):
        missing["output_digest"] = "the server does not give token ids"
    with contextlib.suppress(StopIteration):
        cached = next(stream.cached_tokens for stream in streams if stream.cached_tokens)
        missing["ttft_s"] = f"the server had {cached} tokens of a prompt from before"
    return missing


class TokenCounter:
    """Tokens of a growing text, for a server that gives no ids: how many more the whole text so far
    has than before."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.text, self._count = "", 0

    def add(self, text: str) -> int:
        self.text += text
        before = self._count
        self._count = len(self._tokenizer.encode(self.text, add_special_tokens=False).ids)
        return max(0, self._count - before)
