"""How much memory a context takes, per arm and per rank, and how many requests fit. Plain numbers.

A rank of a tensor-parallel group holds ``max(1, kv_heads / tp)`` of a layer's key-value heads: with
fewer heads than ranks each head is kept by several. Recurrent states and weights are split evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

from tllm_wmtp.errors import ConfigError

ARMS = ("dense", "native", "windowed")


@dataclass(frozen=True)
class LayerKv:
    """Keys and values of ``layers`` attention layers of one shape."""

    layers: int
    kv_heads: int
    head_dim: int

    def heads_per_rank(self, tp: int) -> int:
        """Key-value heads that one of ``tp`` ranks holds: its share, or a copy of one where there
        are more ranks than heads.

        Raises:
            ConfigError: ``tp`` neither divides the heads nor is a multiple of them.
        """
        if tp < 1 or (self.kv_heads % tp and tp % self.kv_heads):
            raise ConfigError(
                f"tensor parallelism {tp} over {self.kv_heads} key-value heads",
                "one number must divide the other",
                "use a power of two",
            )
        return max(1, self.kv_heads // tp)

    def bytes_per_token(self, element_bytes: float, tp: int = 1) -> float:
        """Bytes of one token on one of ``tp`` ranks; errors as :meth:`heads_per_rank`."""
        return self.layers * 2 * self.heads_per_rank(tp) * self.head_dim * element_bytes

    def ring_bytes(self, slots: int, element_bytes: float, tp: int = 1) -> float:
        """Bytes of one lane of ``slots`` on one of ``tp`` ranks, whatever the context."""
        return slots * self.bytes_per_token(element_bytes, tp)


@dataclass(frozen=True)
class Footprint:
    """What a model keeps, all ranks together but for ``target`` and ``draft``, which split by head.

    ``recurrent_bytes`` are one request's recurrent states; ``weight_bytes`` the weights.
    """

    target: LayerKv
    draft: LayerKv
    recurrent_bytes: float = 0.0
    weight_bytes: float = 0.0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank.

    Attributes:
        kv_bytes_per_token, draft_bytes_per_token: of one token, in the target and in the draft.
        draft_share: of all keys and values if the draft keeps the whole context, as the native arm
            does: ``1 / (F + 1)`` for F target layers of the draft layer's shape.
        kv_heads_per_rank: of a target layer and of the draft.
        ring_slots, ring_bytes: of one request's ring.
        native_draft_bytes: of one request's draft keys and values at this context, natively.
        reclaimed_bytes: what a ring saves of them, per request.
        recurrent_bytes: of one request's recurrent states.
        request_bytes: of one request, per arm.
        weight_bytes: of the weights.
        max_batch: requests that fit beside the weights, per arm; None without a memory size.
    """

    context: int
    tp: int
    kv_bytes_per_token: float
    draft_bytes_per_token: float
    draft_share: float
    kv_heads_per_rank: dict[str, int]
    ring_slots: int
    ring_bytes: float
    native_draft_bytes: float
    reclaimed_bytes: float
    recurrent_bytes: float
    request_bytes: dict[str, float]
    weight_bytes: float
    memory_bytes: float | None
    max_batch: dict[str, int] | None


def plan(
    footprint: Footprint,
    context: int,
    ring_slots: int,
    element_bytes: float = 2.0,
    tp: int = 1,
    memory_bytes: float | None = None,
) -> MemoryPlan:
    """The plan of requests of ``context`` tokens.

    Args:
        ring_slots: capacity of a lane, ``n_sink + W + depth * tree_width``.
        element_bytes: of a key or value: 2 in bf16, 1 in fp8.
        memory_bytes: of one rank, as much as may be used.

    Raises:
        ConfigError: heads cannot be split so, a number is not positive, or the weights alone do not
            fit.
    """
    for name, value in (("context", context), ("ring_slots", ring_slots), ("tp", tp)):
        if value < 1:
            raise ConfigError(f"{name} {value}", "it must be 1 or more", f"raise {name}")
    kv = footprint.target.bytes_per_token(element_bytes, tp)
    draft = footprint.draft.bytes_per_token(element_bytes, tp)
    recurrent, weights = footprint.recurrent_bytes / tp, footprint.weight_bytes / tp
    native = context * draft
    ring = footprint.draft.ring_bytes(ring_slots, element_bytes, tp)
    target = context * kv + recurrent
    request = {"dense": target, "native": target + native, "windowed": target + ring}
    return MemoryPlan(
        context=context,
        tp=tp,
        kv_bytes_per_token=kv,
        draft_bytes_per_token=draft,
        draft_share=draft / (kv + draft),
        kv_heads_per_rank={
            "target": footprint.target.heads_per_rank(tp),
            "draft": footprint.draft.heads_per_rank(tp),
        },
        ring_slots=ring_slots,
        ring_bytes=ring,
        native_draft_bytes=native,
        reclaimed_bytes=max(0.0, native - ring),
        recurrent_bytes=recurrent,
        request_bytes=request,
        weight_bytes=weights,
        memory_bytes=memory_bytes,
        max_batch=None if memory_bytes is None else _batches(request, weights, memory_bytes),
    )


def _batches(request: dict[str, float], weights: float, memory: float) -> dict[str, int]:
    if weights >= memory:
        raise ConfigError(
            f"{weights / 1e9:.1f} GB of weights per rank",
            f"{memory / 1e9:.1f} GB may be used",
            "use more memory, more ranks (--tp) or narrower weights",
        )
    return {arm: int((memory - weights) // request[arm]) for arm in ARMS}
