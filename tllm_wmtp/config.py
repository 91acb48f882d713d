"""What a user chooses, validated once. Every error gives the value, the rule and the remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tllm_wmtp.errors import ConfigError

DTYPES = ("float32", "bfloat16")


def _require(holds: bool, value: str, rule: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(value, rule, remedy)


def _require_int(name: str, value: object) -> None:
    _require(
        isinstance(value, int) and not isinstance(value, bool),
        f"{name} {value!r}",
        "it must be an integer",
        f"pass {name} as an int",
    )


@dataclass(frozen=True)
class MtpConfig:
    """Speculation with the checkpoint's built-in MTP head.

    Args:
        depth: most tokens that a step can emit: ``depth - 1`` drafts and the target's own token.
        window: most recent tokens that the draft sees, its own included; None lets it see the
            whole context (the ``native`` arm).
        n_sink: first tokens that the draft always sees.
        adaptive_depth: choose each step's depth, from 1 (no drafts) to ``depth``, by what has been
            accepted and by what steps cost.
        tree_width: drafts per level; above 1 the verify takes the best way through a tree of
            ``tree_width * (depth - 1)`` drafts.

    No choice changes the output: the target verifies every token with full attention.
    """

    depth: int = 7
    window: int | None = 4032
    n_sink: int = 64
    adaptive_depth: bool = False
    tree_width: int = 1

    def __post_init__(self) -> None:
        _require_int("depth", self.depth)
        _require_int("n_sink", self.n_sink)
        _require(
            self.depth >= 2,
            f"depth {self.depth}",
            "a step needs room for one draft and the target's own token, so depth >= 2",
            "use depth 2 or more, or speculation=None for none",
        )
        _require(
            self.n_sink >= 0,
            f"n_sink {self.n_sink}",
            "the number of always visible first tokens must not be negative",
            "use 0 or more (64 is the usual choice)",
        )
        _require_int("tree_width", self.tree_width)
        _require(
            self.tree_width >= 1,
            f"tree_width {self.tree_width}",
            "each level of a draft tree has at least one draft",
            "use 1 for a chain, 2 or more for a tree",
        )
        if self.window is None:
            return
        _require_int("window", self.window)
        _require(
            self.window >= 1,
            f"window {self.window}",
            "the window counts the draft's own token, so it must be 1 or more",
            "use 1 or more (4032 is the usual choice), or None for the full context",
        )

    @classmethod
    def native(cls, depth: int = 7, adaptive_depth: bool = False, tree_width: int = 1) -> MtpConfig:
        """A draft that attends to the whole context, as the checkpoint's makers run it."""
        return cls(depth, None, 0, adaptive_depth, tree_width)

    @property
    def draft_len(self) -> int:
        """Draft forwards, hence drafts, per step (gamma)."""
        return self.depth - 1

    @property
    def rows(self) -> int:
        """Rows that a step verifies at most: the pending token and its drafts."""
        return 1 + self.tree_width * self.draft_len

    @property
    def arm(self) -> str:
        return "native" if self.window is None else "windowed"

    def resolved(self, max_seq_len: int, max_positions: int) -> MtpConfig:
        """The same choice with a concrete window, checked against the model's limit.

        The native arm is the windowed one with a window that no request can outgrow.
        """
        if self.window is None:
            return replace(self, window=max_seq_len + self.rows)
        reach = self.n_sink + self.window
        _require(
            reach <= max_positions,
            f"n_sink {self.n_sink} + window {self.window} = {reach}",
            f"the draft cannot see more than the model's {max_positions} positions",
            "lower window or n_sink, or use window=None for the full context",
        )
        return self


def arm_of(speculation: MtpConfig | None) -> str:
    """``dense``, ``native`` or ``windowed``."""
    return "dense" if speculation is None else speculation.arm


@dataclass(frozen=True)
class KvCacheConfig:
    """The pool that holds the target's keys and values.

    Args:
        max_tokens: tokens that the pool holds, all requests together; None sizes it for
            ``max_batch_size`` requests of ``max_seq_len`` tokens, as far as memory allows.
        tokens_per_page: tokens per page of the pool.
        dtype: element type of the pool and of the draft's ring; ``auto`` is the compute type.
        enable_block_reuse: keep what requests leave behind (pages, recurrent states, draft ring),
            so that a prompt that begins with an earlier one, or with an earlier one and its output,
            is computed only from there on.
        reuse_bytes: most memory for that, without the pages, which stay in the pool and are given
            up when running requests need them; None is room for two copies per running request,
            at least 64 MiB and at most an eighth of the free memory.
        snapshot_interval: besides what whole prompts and outputs leave, also keep what every
            ``snapshot_interval`` tokens of a prompt leave, for prompts that only begin alike (a
            common system prompt). Each costs memory, and its window's rows cannot be left out of
            the last layer; None keeps none.
    """

    max_tokens: int | None = None
    tokens_per_page: int = 64
    dtype: str = "auto"
    enable_block_reuse: bool = True
    reuse_bytes: int | None = None
    snapshot_interval: int | None = None

    def __post_init__(self) -> None:
        if self.snapshot_interval is not None:
            _require_int("snapshot_interval", self.snapshot_interval)
            _require(
                self.snapshot_interval >= 1,
                f"snapshot_interval {self.snapshot_interval}",
                "it is a number of tokens",
                "use a few thousand, or None for no snapshots within prompts",
            )
        if self.reuse_bytes is not None:
            _require_int("reuse_bytes", self.reuse_bytes)
            _require(
                self.reuse_bytes >= 0,
                f"reuse_bytes {self.reuse_bytes}",
                "it is an amount of memory in bytes",
                "use enable_block_reuse=False for none, or None for the default",
            )
        _require_int("tokens_per_page", self.tokens_per_page)
        _require(
            self.tokens_per_page >= 1,
            f"tokens_per_page {self.tokens_per_page}",
            "a page holds at least one token",
            "use 1 or more (64 is the usual choice)",
        )
        _require(
            self.dtype in ("auto", *DTYPES),
            f"KV cache dtype {self.dtype!r}",
            f"it must be one of {', '.join(('auto', *DTYPES))}",
            "use 'auto' for the compute type",
        )
        if self.max_tokens is None:
            return
        _require_int("max_tokens", self.max_tokens)
        _require(
            self.max_tokens >= self.tokens_per_page,
            f"KV cache max_tokens {self.max_tokens}",
            f"the pool needs at least one page of {self.tokens_per_page} tokens",
            "raise max_tokens or leave it None",
        )


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine; see :class:`tllm_wmtp.LLM` for what a user passes.

    Args:
        speculation: None for the dense arm.
        max_batch_size: requests that run at the same time; others wait.
        max_seq_len: most tokens of one request, prompt and output; None is the model's limit.
        prefill_chunk: most prompt tokens per forward.
        prefill_pruning: leave out the rows of the last layer that nobody reads (exact).
    """

    speculation: MtpConfig | None = None
    kv_cache: KvCacheConfig = KvCacheConfig()
    max_batch_size: int = 8
    max_seq_len: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    prefill_chunk: int = 2048
    prefill_pruning: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "prefill_chunk"):
            value = getattr(self, name)
            _require_int(name, value)
            _require(value >= 1, f"{name} {value}", "it must be 1 or more", f"raise {name}")
        if self.max_seq_len is not None:
            _require_int("max_seq_len", self.max_seq_len)
            _require(
                self.max_seq_len >= 2,
                f"max_seq_len {self.max_seq_len}",
                "a request holds at least one prompt token and one output token",
                "raise max_seq_len or leave it None for the model's limit",
            )
        _require(
            self.dtype in DTYPES,
            f"dtype {self.dtype!r}",
            f"weights are computed in one of {', '.join(DTYPES)}",
            "use 'float32' on a CPU",
        )
        _require(
            re.fullmatch(r"cpu|cuda(:\d+)?", str(self.device)) is not None,
            f"device {self.device!r}",
            "it must be 'cpu' or 'cuda', with an index if need be",
            "use 'cpu'",
        )
        _require(
            self.speculation is None or isinstance(self.speculation, MtpConfig),
            f"speculation {self.speculation!r}",
            "it must be None (dense) or an MtpConfig",
            "pass MtpConfig(depth=7, window=4032, n_sink=64)",
        )
        _require(
            isinstance(self.kv_cache, KvCacheConfig),
            f"kv_cache_config {self.kv_cache!r}",
            "it must be a KvCacheConfig",
            "pass KvCacheConfig(max_tokens=...)",
        )

    def resolved(self, max_positions: int) -> EngineConfig:
        """The same with a concrete ``max_seq_len``, window and KV type, checked for this model."""
        max_seq_len = max_positions if self.max_seq_len is None else self.max_seq_len
        _require(
            max_seq_len <= max_positions,
            f"max_seq_len {max_seq_len}",
            f"the model has {max_positions} positions",
            f"use at most {max_positions}, or a checkpoint whose config.json extends them (YaRN)",
        )
        speculation = self.speculation and self.speculation.resolved(max_seq_len, max_positions)
        kv_dtype = self.dtype if self.kv_cache.dtype == "auto" else self.kv_cache.dtype
        return replace(
            self,
            max_seq_len=max_seq_len,
            speculation=speculation,
            kv_cache=replace(self.kv_cache, dtype=kv_dtype),
        )
