"""Reads and the attention behind them, against sums written out key by key in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tllm_wmtp.bench.probe import attend as attend_module
from tllm_wmtp.bench.probe.attend import ProbeAttend
from tllm_wmtp.bench.probe.reads import (
    SINK,
    TAIL,
    UNSEEN,
    WINDOW,
    MeanRead,
    NativeRead,
    Places,
    Read,
    ShuffledRead,
    WindowedRead,
)

HEADS, KV_HEADS, DIM, COMMITTED = 4, 2, 6, 23
STARTS = torch.tensor([9, 15, 22])
SCALE = 0.4


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KEYS, VALUES = draw(COMMITTED, KV_HEADS, DIM, seed=1), draw(COMMITTED, KV_HEADS, DIM, seed=2)


def made(value_dim: int = DIM) -> ProbeAttend:
    return ProbeAttend(KEYS, VALUES, STARTS, SCALE, value_dim)


def row(level: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one row of each draft phase."""
    n = len(STARTS)
    return (
        draw(n, HEADS, DIM, seed=10 * level + 3),
        draw(n, KV_HEADS, DIM, seed=10 * level + 4),
        draw(n, KV_HEADS, DIM, seed=10 * level + 5),
    )


def visible_windowed(position: int, query: int, window: int, n_sink: int) -> bool:
    return position <= query and (position < n_sink or position > query - window)


def by_hand(phase: int, level: int, window: int, n_sink: int) -> torch.Tensor:
    """``[Hq, D]``: what row ``level`` of a draft phase reads, from a dict of positions."""
    start = int(STARTS[phase])
    keys = {p: (KEYS[p].double(), VALUES[p].double()) for p in range(start)}
    for earlier in range(level + 1):
        _, k, v = row(earlier)
        keys[start + earlier] = (k[phase].double(), v[phase].double())
    query = start + level
    seen = [p for p in keys if visible_windowed(p, query, window, n_sink)]
    q = row(level)[0][phase].double()
    out = []
    for head in range(HEADS):
        of = head // (HEADS // KV_HEADS)
        scores = [math.exp(float(q[head] @ keys[p][0][of]) * SCALE) for p in seen]
        total = sum(scores)
        out.append(sum(s / total * keys[p][1][of] for s, p in zip(scores, seen, strict=True)))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("read", "window", "n_sink"),
    [
        (NativeRead(), 1000, 0),
        (WindowedRead(5, 2), 5, 2),
        (WindowedRead(1, 0), 1, 0),
        (WindowedRead(2, 11), 2, 11),
    ],
)
@pytest.mark.parametrize("most_scores", [1, 1 << 24])
def test_three_rows_of_every_draft_phase_read_what_they_may_see(
    read: Read, window: int, n_sink: int, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_module, "MOST_SCORES", most_scores)
    attend = made()
    for level in range(3):
        attend.read = WindowedRead(3, 1)
        attend(*row(level))  # a call keeps nothing, however often it is made
        attend.read = read
        out = attend(*row(level))
        attend.advance()
        for phase in range(len(STARTS)):
            expected = by_hand(phase, level, window, n_sink)
            torch.testing.assert_close(out[phase].double(), expected, atol=1e-5, rtol=1e-5)


def test_every_key_is_in_one_band() -> None:
    places = Places(torch.arange(9).expand(2, 9), torch.tensor([6, 1]))
    assert places.bands(window=2, n_sink=3).tolist() == [
        [SINK, SINK, SINK, TAIL, TAIL, WINDOW, WINDOW, UNSEEN, UNSEEN],
        [SINK, SINK, *[UNSEEN] * 7],
    ]


WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
SCORES = torch.cat((WEIGHTS.log(), torch.tensor([9.0]))).expand(2, 1, 6)
FIVE = Places(torch.arange(6)[None], torch.tensor([4]))  # one sink, two of the tail, two in W


def test_a_windowed_read_gives_the_tails_mass_to_the_rest() -> None:
    weights = WindowedRead(2, 1).weights(SCORES, FIVE)
    expected = torch.tensor([0.2, 0.0, 0.0, 0.3, 0.5, 0.0])
    torch.testing.assert_close(weights, expected.expand(2, 1, 6))


def test_a_mean_read_weighs_the_values_of_its_band_alike() -> None:
    tail = MeanRead(TAIL, 2, 1).weights(SCORES, FIVE)
    torch.testing.assert_close(tail[0, 0], torch.tensor([0.1, 0.25, 0.25, 0.15, 0.25, 0.0]))
    window = MeanRead(WINDOW, 2, 1).weights(SCORES, FIVE)
    torch.testing.assert_close(window[1, 0], torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2, 0.0]))


def test_a_shuffled_read_permutes_its_band_alike_in_all_heads_and_touches_nothing_else() -> None:
    places = Places(torch.arange(40).expand(3, 40), torch.tensor([30, 34, 39]))
    scores = draw(4, 3, 40, seed=7)
    native = NativeRead().weights(scores, places)
    generator = torch.Generator().manual_seed(5)
    shuffled = ShuffledRead(TAIL, 8, 4, generator).weights(scores, places)
    bands = places.bands(8, 4)
    for query in range(3):
        inside = bands[query] == TAIL
        assert torch.equal(shuffled[:, query, ~inside], native[:, query, ~inside])
        before, after = native[:, query, inside], shuffled[:, query, inside]
        assert not torch.equal(before, after)
        order = [before[0].tolist().index(weight) for weight in after[0].tolist()]
        assert sorted(order) == list(range(len(order)))
        assert torch.equal(after, before[:, order])


@pytest.mark.parametrize("kind", ["mean", "shuffled"])
def test_a_band_without_keys_changes_nothing(kind: str) -> None:
    places = Places(torch.arange(6)[None], torch.tensor([4]))
    read: Read = MeanRead(TAIL, 9, 1)
    if kind == "shuffled":
        read = ShuffledRead(TAIL, 9, 1, torch.Generator())
    assert torch.equal(read.weights(SCORES, places), NativeRead().weights(SCORES, places))


def test_permuted_weights_are_permuted_values() -> None:
    """The identity that the reads rest on, with the values really moved."""
    weights = NativeRead().weights(SCORES, FIVE)[0, 0]
    values = draw(6, DIM, seed=8)
    generator = torch.Generator().manual_seed(11)
    shuffled = ShuffledRead(TAIL, 2, 1, generator).weights(SCORES, FIVE)[0, 0]
    moved, swapped = values.clone(), values.clone()
    swapped[[1, 2]] = values[[2, 1]]
    if not torch.equal(shuffled, weights):
        moved = swapped
    torch.testing.assert_close(shuffled @ values, weights @ moved)
    mean = values.clone()
    mean[1:3] = values[1:3].mean(0)
    torch.testing.assert_close(MeanRead(TAIL, 2, 1).weights(SCORES, FIVE)[0, 0] @ values,
                               weights @ mean)  # fmt: skip


def test_an_observer_sees_weights_and_norms_of_the_part_that_is_read() -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    attend = made(value_dim=4)
    attend.observer = lambda scores, weights, places, norms: seen.append((weights, norms))
    q, k, v = row(0)
    out = attend(q, k, v)
    weights, norms = seen[0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, len(STARTS)))
    assert norms.shape == (KV_HEADS, len(STARTS), COMMITTED + 1)
    torch.testing.assert_close(norms[1, 2, 5], VALUES[5, 1, :4].norm())
    torch.testing.assert_close(norms[1, 2, -1], v[2, 1, :4].norm())
    assert out.shape == (len(STARTS), HEADS, DIM)
    assert torch.equal(attend.answer, out[..., :4])
