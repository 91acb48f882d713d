"""A cell: one setting, all of it, and the name that it goes by."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tllm_wmtp.bench.common import config_hash
from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
from tllm_wmtp.sampling import SamplingParams

ARMS = ("dense", "native", "windowed")
#: What an output token costs a request, in prompt tokens; a guess that only the time left hangs on.
OUTPUT_TOKEN = 50
#: Context at which a native draft's prefill takes as long as everything else of the prefill.
NATIVE_CONTEXT = 16384


@dataclass(frozen=True)
class TargetConfig:
    """Who answers: this package's runtime, or a server.

    Args:
        kind: ``embedded``, ``openai`` or ``triton``.
        url: of a server: ``http://host:port``, or ``host:port`` of Triton's gRPC.
        model: the server's name of the model.
        api_key_env: environment variable that holds the server's key.
        return_token_ids: ask an OpenAI server for token ids, which the interface itself has not.
        timeout_s: longest wait for a server's next piece.
    """

    kind: str = "embedded"
    url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    return_token_ids: bool = True
    timeout_s: float = 600.0


@dataclass(frozen=True)
class InputConfig:
    """What is asked; the arguments of :func:`tllm_wmtp.bench.inputs.prompts`."""

    task: str
    lexicon: str = "english"
    difficulty: str = "medium"
    path: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are chosen; names and meanings are those of :class:`tllm_wmtp.SamplingParams`."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False

    def params(self, seed: int | None) -> SamplingParams:
        """
        Raises:
            RequestError: a value breaks a rule.
        """
        return SamplingParams(**asdict(self), seed=None if self.greedy else seed)

    @property
    def greedy(self) -> bool:
        return SamplingParams(**asdict(self)).greedy


@dataclass(frozen=True)
class Cell:
    """One setting. ``repeats`` batches of ``batch`` requests are answered, each with a prompt of
    its own; ``seed`` is that of the prompts, and of the sampling where there is any.

    The dense arm has depth 1, and neither it nor the native one has a window or sinks. At a server,
    arm, depth, window, sinks and types are what the suite says of it.
    """

    target: TargetConfig
    model: str
    device: str
    dtype: str
    arm: str
    depth: int
    window: int | None
    n_sink: int
    kv_dtype: str
    input: InputConfig
    context: int
    batch: int
    repeats: int
    seed: int
    sampling: SamplingConfig
    prefill_chunk: int

    @property
    def digest(self) -> str:
        """Twelve hex digits that name all of it."""
        return config_hash(self)

    @property
    def config(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def requests(self) -> int:
        return self.repeats * self.batch

    @property
    def speculation(self) -> MtpConfig | None:
        if self.arm == "dense":
            return None
        if self.arm == "native":
            return MtpConfig.native(self.depth)
        return MtpConfig(self.depth, self.window, self.n_sink)

    @property
    def engine_config(self) -> EngineConfig:
        """Without reuse of prefixes: every prompt's time to the first token is that of its whole
        prefill. The pool holds every request of the batch, so none waits for another's end."""
        longest = self.context + self.sampling.max_tokens
        page = KvCacheConfig().tokens_per_page
        rows = 1 if self.speculation is None else self.speculation.rows
        pages = -(-(longest + rows) // page) + 1  # one that the scheduler leaves for its growth
        pool = self.batch * pages * page
        return EngineConfig(
            speculation=self.speculation,
            kv_cache=KvCacheConfig(pool, dtype=self.kv_dtype, enable_block_reuse=False),
            max_batch_size=self.batch,
            max_seq_len=longest,
            dtype=self.dtype,
            device=self.device,
            prefill_chunk=self.prefill_chunk,
        )

    @property
    def prefill_cost(self) -> float:
        """Predicted time of a batch's prefill, in tokens of a prompt without drafts."""
        reads_all = self.arm == "native" or (self.window or 0) + self.n_sink >= self.context
        share = self.context / NATIVE_CONTEXT if self.arm != "dense" and reads_all else 0.0
        return self.batch * self.context * (1 + share)

    @property
    def decode_cost(self) -> float:
        """Predicted time of a batch's output, in the same unit."""
        return float(self.batch * self.sampling.max_tokens * OUTPUT_TOKEN)

    @property
    def cost(self) -> float:
        return self.repeats * (self.prefill_cost + self.decode_cost)

    @property
    def label(self) -> str:
        """What tells it from its neighbours, for people."""
        draft = "" if self.arm == "dense" else f" d{self.depth}"
        if self.window is not None:
            draft += f" W{self.window}+{self.n_sink}"
        return (
            f"{self.model} {self.input.task} {self.context:,} {self.arm}{draft} "
            f"{self.kv_dtype} b{self.batch} s{self.seed}"
        )


Key = Callable[[Cell], Any]


def prompts_key(cell: Cell) -> str:
    """Equal for cells that answer the same prompts in the same batches."""
    return _spelled(
        cell.input, cell.model, cell.context, cell.batch, cell.repeats, cell.seed, cell.sampling
    )


def engines_key(cell: Cell) -> str:
    """Equal for cells whose engines may be kept from one prompt to the next, side by side."""
    return _spelled(
        cell.model, cell.device, cell.dtype, cell.context, cell.batch, cell.sampling.max_tokens,
        cell.prefill_chunk,
    )  # fmt: skip


def in_groups(cells: Sequence[Cell], key: Key) -> list[list[Cell]]:
    """Cells of equal key together, in the order of each key's first."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.values())


def _spelled(*parts: Any) -> str:
    return json.dumps([getattr(part, "__dict__", part) for part in parts], sort_keys=True)
