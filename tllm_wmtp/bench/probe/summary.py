"""One dictionary that sums up what was seen, every number with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tllm_wmtp.bench.common import RESAMPLES, interval_of
from tllm_wmtp.bench.probe.reads import BANDS, SINK, TAIL
from tllm_wmtp.bench.probe.samples import Outcome, Samples
from tllm_wmtp.metrics import Proportion

NO_TAIL = "no key lies outside sink and window: raise the context or lower the window"
NO_SINK = "the sink is empty"
NO_EXPERTS = "the draft head has no routed experts"
NO_FLIP = "no draft changed"
ALL_FLIPS = "every draft changed"
NO_TARGET = "no draft follows drafts that the target made too"
ONE_POSITION = "one position has no interval"


def mean_and_interval(
    values: torch.Tensor, positions: torch.Tensor, seed: int = 0
) -> tuple[float, list[float] | None]:
    """Mean of ``values [Q]`` and its 95 % bootstrap interval over positions: the drafts of one
    step stand or fall together. Of one position there is no interval."""
    _, index = np.unique(positions.numpy(), return_inverse=True)
    sums, counts = np.bincount(index, values.double().numpy()), np.bincount(index)
    value = float(sums.sum() / counts.sum())
    if len(counts) < 2:
        return value, None
    drawn = np.random.default_rng(seed).integers(len(counts), size=(RESAMPLES, len(counts)))
    return value, interval_of((sums[drawn].sum(1) / counts[drawn].sum(1)).tolist())


class Summary:
    """Fields of one result, each with its interval and, where it is null, the reason."""

    def __init__(self, samples: Samples):
        self.samples = samples
        self.content: dict[str, Any] = {}
        self.missing: dict[str, str] = {}

    def mean(
        self,
        name: str,
        values: torch.Tensor | None,
        reason: str,
        chosen: torch.Tensor | None = None,
    ) -> None:
        """Sets ``name`` and ``name_interval`` to the mean of ``values [Q]`` where ``chosen``; to
        null, for ``reason``, where that is nothing."""
        value, interval = self.value_of(name, values, reason, chosen)
        self.content[name], self.content[f"{name}_interval"] = value, interval

    def by_band(self, name: str, values: torch.Tensor) -> None:
        """The same of ``values [Q, heads, 3]`` for each band that has keys, and for each head."""
        keys = self.samples.keys
        means: dict[str, float | None] = {}
        intervals: dict[str, list[float] | None] = {}
        for index, band in enumerate(BANDS):
            reason = {SINK: NO_SINK, TAIL: NO_TAIL}.get(index, "")
            means[band], intervals[band] = self.value_of(
                f"{name}.{band}", values[:, :, index].mean(1), reason, keys[:, index] > 0
            )
        self.content[name], self.content[f"{name}_interval"] = means, intervals
        self.content[f"{name}_by_head"] = [
            {"head": head}
            | {
                band: float(of_head[keys[:, index] > 0, index].mean()) if means[band] is not None
                else None
                for index, band in enumerate(BANDS)
            }
            for head, of_head in enumerate(values.unbind(1))
        ]  # fmt: skip

    def value_of(
        self,
        name: str,
        values: torch.Tensor | None,
        reason: str,
        chosen: torch.Tensor | None = None,
    ) -> tuple[float | None, list[float] | None]:
        positions = self.samples.position
        if values is not None and chosen is not None:
            values, positions = values[chosen], positions[chosen]
        if values is None or values.numel() == 0:
            self.missing[name] = reason
            return None, None
        value, interval = mean_and_interval(values, positions)
        if interval is None:
            self.missing[f"{name}_interval"] = ONE_POSITION
        return value, interval


def agreement(same: torch.Tensor) -> dict[str, Any]:
    """Share of ``same [Q]`` with its Wilson interval."""
    share = Proportion(int(same.sum()), same.numel())
    return {"agreement": share.value, "interval": list(share.interval), "drafts": share.trials}


def summarise(
    samples: Samples, windows: Mapping[int, str], window: int, changes: Sequence[str]
) -> dict[str, Any]:
    """Everything about ``samples``, at the operating ``window``, as JSON.

    Args:
        windows: the name of every window's read in ``samples.outcomes``.
        changes: the names of the reads whose values were changed.
    """
    at = samples.outcomes[windows[window]]
    summary = Summary(samples)
    content, flips = summary.content, ~at.same
    share = agreement(at.same)
    content |= {
        "drafts": share["drafts"],
        "agreement": share["agreement"],
        "agreement_interval": share["interval"],
        "flips": int(flips.sum()),
    }
    summary.mean("margin", samples.margin, "")
    summary.mean("margin_at_flips", samples.margin, NO_FLIP, flips)
    summary.mean("margin_elsewhere", samples.margin, ALL_FLIPS, at.same)
    summary.mean("kl", at.kl, "")
    summary.mean("read_change", at.change, "")
    judged = samples.judged
    for arm, token in (("native", samples.native), ("windowed", at.token)):
        right = (token == samples.truth).double()
        summary.mean(f"right_{arm}", right, NO_TARGET, judged)
    content["right_drafts"] = int(judged.sum())
    summary.by_band("mass", samples.mass)
    summary.by_band("value_norm", samples.value_norm)
    tail_keys = samples.keys[:, TAIL]
    summary.mean("tail_keys", tail_keys, "")
    summary.mean("tail_entropy", samples.tail_entropy.mean(1), NO_TAIL, tail_keys > 0)
    most = tail_keys.clamp(min=2).double().log()
    share_of_most = samples.tail_entropy.double().mean(1) / most
    summary.mean("tail_entropy_share", share_of_most, NO_TAIL, tail_keys > 1)
    summary.mean("tail_participation", samples.tail_participation.mean(1), NO_TAIL, tail_keys > 0)
    summary.mean("router_jaccard", at.jaccard, NO_EXPERTS)
    content["by_draft"] = [
        {"draft": draft, **agreement(at.same[samples.draft == draft])}
        for draft in range(1, int(samples.draft.max()) + 1)
    ]
    content["perturbations"] = {
        name: changed(summary, name, samples.outcomes[name]) for name in changes
    }
    content["curve"] = [
        {"window": each, **changed(summary, f"window {each}", samples.outcomes[name])}
        for each, name in sorted(windows.items())
    ]
    content["missing"] = summary.missing
    return content


def changed(summary: Summary, name: str, outcome: Outcome) -> dict[str, Any]:
    """How far one read is from the native one."""
    kl, kl_interval = summary.value_of(f"{name}.kl", outcome.kl, "")
    change, change_interval = summary.value_of(f"{name}.read_change", outcome.change, "")
    return {
        **agreement(outcome.same),
        "flips": int((~outcome.same).sum()),
        "kl": kl,
        "kl_interval": kl_interval,
        "read_change": change,
        "read_change_interval": change_interval,
    }
