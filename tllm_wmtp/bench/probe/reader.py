"""One draft head, run over the same keys under every read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tllm_wmtp.bench.probe.attend import ProbeAttend
from tllm_wmtp.bench.probe.measures import (
    AttentionRecord,
    jaccard,
    kl_divergence,
    margin,
    relative_change,
)
from tllm_wmtp.bench.probe.reads import NativeRead, Read
from tllm_wmtp.bench.probe.router import chosen_experts
from tllm_wmtp.bench.probe.samples import Outcome, Samples
from tllm_wmtp.bench.probe.trajectory import Trajectory
from tllm_wmtp.checkpoint.loader import LoadedModel
from tllm_wmtp.executor.engine import not_finite
from tllm_wmtp.models.deepseek_v3 import DeepseekV3Config
from tllm_wmtp.models.spec import DraftHead, ModelConfig, Target


def value_dim(config: ModelConfig) -> int:
    """Elements of a cached value that the draft head reads; a latent head's rest are its key's."""
    if isinstance(config, DeepseekV3Config):
        return config.latent.kv_lora_rank
    return config.caches.draft.head_dim


@dataclass(frozen=True)
class Pass:
    """One forward of the head: ``output [N, H]``, ``logits [N, V]``, the attention's ``answer
    [N, Hq, Dv]`` and the experts ``[N, k]`` of each mixture."""

    output: torch.Tensor
    logits: torch.Tensor
    answer: torch.Tensor
    experts: list[torch.Tensor]

    @property
    def token(self) -> torch.Tensor:
        return self.logits.argmax(-1)


class HeadReader:
    """A draft head on N draft phases at once; the native read decides how they go on."""

    def __init__(self, loaded: LoadedModel, trajectory: Trajectory):
        if loaded.head is None:
            raise RuntimeError("the model was loaded without its head")
        self.target: Target = loaded.target
        self.head: DraftHead = loaded.head
        kv = loaded.config.caches.draft
        self.attend = ProbeAttend(
            trajectory.keys,
            trajectory.values,
            trajectory.starts,
            kv.scale,
            value_dim(loaded.config),
        )
        self.token, self.hidden = trajectory.tokens, trajectory.hidden
        self.positions = trajectory.starts

    def __call__(self, read: Read, observer: AttentionRecord | None = None) -> Pass:
        """The next draft under ``read``."""
        self.attend.read, self.attend.observer = read, observer
        embedding = self.head.embed(self.target, self.token)
        with chosen_experts(self.head) as experts:
            output = self.head(embedding, self.hidden, self.positions, self.attend)
        logits = self.head.logits(self.target, output).float()
        if not logits.isfinite().all():
            raise not_finite()
        return Pass(output, logits, self.attend.answer, experts)

    def advance(self, native: Pass) -> None:
        """Feeds the draft that ``native`` made."""
        self.attend.advance()
        self.token, self.hidden = native.token, native.output
        self.positions = self.positions + 1


def outcome_of(native: Pass, other: Pass) -> Outcome:
    overlap = [jaccard(*pair) for pair in zip(native.experts, other.experts, strict=True)]
    return Outcome(
        token=other.token,
        same=other.token == native.token,
        kl=kl_divergence(native.logits, other.logits),
        change=relative_change(native.answer, other.answer),
        jaccard=torch.stack(overlap).mean(0) if overlap else None,
    )


@torch.inference_mode()
def compare(
    loaded: LoadedModel,
    trajectory: Trajectory,
    reads: dict[str, Read],
    observer: AttentionRecord,
    levels: int,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> Samples:
    """``levels`` drafts from every position of the trajectory, each under every read.

    Args:
        observer: a new one; it sees the native reads.
        on_progress: called with the levels done and all of them.
    """
    reader, count = HeadReader(loaded, trajectory), len(trajectory.tokens)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in reads}
    per_level: list[dict[str, torch.Tensor]] = []
    followed = torch.ones(count, dtype=torch.bool)  # so far, every draft was the target's token
    for level in range(levels):
        native = reader(NativeRead(), observer)
        for name, read in reads.items():
            outcomes[name].append(outcome_of(native, reader(read)))
        later = torch.arange(count) + level + 1
        truth = trajectory.tokens[later.clamp(max=count - 1)]
        judged = followed & (later < count)
        followed = judged & (native.token == truth)
        per_level.append(
            {
                "draft": torch.full((count,), level + 1),
                "position": torch.arange(count),
                "margin": margin(native.logits),
                "judged": judged,
                "native": native.token,
                "truth": truth,
            }
        )
        reader.advance(native)
        on_progress(level + 1, levels)
    return Samples(
        **{name: torch.cat([each[name] for each in per_level]) for name in per_level[0]},
        **observer.collect(),
        outcomes={name: Outcome.pool(parts) for name, parts in outcomes.items()},
    )
