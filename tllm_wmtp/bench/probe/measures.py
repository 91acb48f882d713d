"""What a read looks like, and how far two of them are apart. Pure functions of tensors."""

from __future__ import annotations

import torch

from tllm_wmtp.bench.probe.reads import BANDS, TAIL, Places


def band_mass(weights: torch.Tensor, bands: torch.Tensor) -> torch.Tensor:
    """``[n, Hq, 3]``: the part of ``weights [Hq, n, K]`` in each of the ``BANDS``."""
    parts = [(weights * (bands == band)).sum(-1) for band in range(len(BANDS))]
    return torch.stack(parts, -1).transpose(0, 1)


def band_means(values: torch.Tensor, bands: torch.Tensor) -> torch.Tensor:
    """``[n, Hkv, 3]``: mean of ``values [Hkv, n, K]`` over the keys of each band; 0 over none."""
    parts = []
    for band in range(len(BANDS)):
        inside = bands == band
        parts.append((values * inside).sum(-1) / inside.sum(-1).clamp(min=1))
    return torch.stack(parts, -1).transpose(0, 1)


def entropy_and_participation(
    scores: torch.Tensor, inside: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, Hq]`` each, of the softmax of ``scores [Hq, n, K]`` over the keys ``inside [n, K]``:
    entropy ``-sum p ln p`` in nats, and participation ``1 / sum p^2`` in keys.

    Where nothing is inside, both are 0.
    """
    log_p = scores.masked_fill(~inside, -torch.inf).log_softmax(-1)
    log_p = log_p.masked_fill(~inside, -torch.inf)  # of no keys, log_softmax makes NaN
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(~inside, 0.0)).sum(-1)
    square = p.square().sum(-1)
    participation = torch.where(square > 0, 1 / square.clamp(min=1e-30), square)
    return entropy.T, participation.T


def jaccard(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``[n]``: ``|A & B| / |A | B|`` of the sets in each row of ``[n, k]``, without repeats."""
    common = (one[:, :, None] == other[:, None, :]).sum((1, 2))
    return common / (one.shape[1] + other.shape[1] - common)


def kl_divergence(logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``[n]``, in nats: KL(softmax(logits) || softmax(other)) of ``[n, V]``."""
    log_p, log_q = logits.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def margin(logits: torch.Tensor) -> torch.Tensor:
    """``[n]``: the best logit less the second best."""
    best = logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def relative_change(answer: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``[n]``: ``|o - o'| / |o|`` (L2) of attention outputs ``[n, Hq, D]``, all heads together.

    The paper's ``win_perturb`` (arXiv 2607.21535, table 12) where ``o'`` is the windowed read.
    """
    gap = (answer - other).flatten(1).norm(dim=-1)
    return gap / answer.flatten(1).norm(dim=-1).clamp(min=1e-30)


class AttentionRecord:
    """An :class:`.attend.Observer`: bands, entropies and value norms of everything it sees."""

    def __init__(self, window: int, n_sink: int):
        self.window, self.n_sink = window, n_sink
        self._parts: list[tuple[torch.Tensor, ...]] = []

    def __call__(
        self,
        scores: torch.Tensor,
        weights: torch.Tensor,
        places: Places,
        value_norms: torch.Tensor,
    ) -> None:
        bands = places.bands(self.window, self.n_sink)
        keys = torch.stack([(bands == band).sum(-1) for band in range(len(BANDS))], -1)
        self._parts.append(
            (
                keys,
                band_mass(weights, bands),
                band_means(value_norms, bands),
                *entropy_and_participation(scores, bands == TAIL),
            )
        )

    def collect(self) -> dict[str, torch.Tensor]:
        """``keys [Q, 3]``, ``mass [Q, Hq, 3]``, ``value_norm [Q, Hkv, 3]``, ``tail_entropy`` and
        ``tail_participation [Q, Hq]``."""
        names = ("keys", "mass", "value_norm", "tail_entropy", "tail_participation")
        parts = (torch.cat(each) for each in zip(*self._parts, strict=True))
        return dict(zip(names, parts, strict=True))
