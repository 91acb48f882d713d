"""Trees drafted into a ring, level by level, against a dict of positions.

The real operators run. Queries are zero, so an answer is the plain mean of the values a row sees:
one key too many, too few or overwritten moves it by far more than rounding does.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tllm_wmtp import ops, tree
from tllm_wmtp.ring import RingSpec
from tllm_wmtp.tree import TreeShape

HEAD_DIM = 8


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(counts: Sequence[int]) -> torch.Tensor:
    return int32([0, *torch.tensor(counts).cumsum(0).tolist()])


class TreeDrafts:
    """Requests that draft trees, their rings full of NaN, and the oracle: for each request the
    value of every position whose row was accepted."""

    def __init__(
        self, spec: RingSpec, shape: TreeShape, prompts: Sequence[int], chunk: int
    ) -> None:
        self.spec, self.shape = spec, shape
        batch = len(prompts)
        self.ring_k = torch.full((batch + 1, spec.capacity, 1, HEAD_DIM), torch.nan)
        self.ring_v = self.ring_k.clone()
        self.lanes = torch.randperm(batch + 1)[:batch].int()
        self.history: list[dict[int, torch.Tensor]] = [{} for _ in prompts]
        while any(len(own) < n for own, n in zip(self.history, prompts, strict=True)):
            counts = [
                min(chunk, n - len(own)) for own, n in zip(self.history, prompts, strict=True)
            ]
            starts, values = self._accept(counts)
            ops.ring_append(
                torch.randn_like(values),
                values,
                self.ring_k,
                self.ring_v,
                offsets(counts),
                starts,
                self.lanes,
                spec.n_sink,
            )

    def _accept(self, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows with new values after each request's last; their starts and values."""
        starts = torch.tensor([len(own) for own in self.history])
        values = torch.randn(sum(counts), 1, HEAD_DIM)
        row = 0
        for own, count in zip(self.history, counts, strict=True):
            for _ in range(count):
                own[len(own)] = values[row, 0]
                row += 1
        return starts, values

    def _seen(self, b: int, start: int, query: int) -> list[torch.Tensor]:
        """Values at positions before ``start`` that a query sees, by the definition."""
        n_sink, window = self.spec.n_sink, self.spec.window
        positions = [p for p in range(start) if p <= query and (p < n_sink or p > query - window)]
        return [self.history[b][p] for p in positions]

    def _call(
        self,
        values: torch.Tensor,
        rows: Sequence[int],
        queries: Sequence[int],
        starts: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return ops.windowed_draft_attention(
            torch.zeros(sum(queries), 1, HEAD_DIM),
            torch.randn_like(values),
            values,
            self.ring_k,
            self.ring_v,
            offsets(rows),
            offsets(queries),
            starts,
            self.lanes,
            self.spec.n_sink,
            self.spec.window,
            1.0,
            mask,
        )[:, 0]

    def extend(self, counts: Sequence[int]) -> None:
        """Feeds the accepted rows of the step before as a chain; the last one is asked."""
        starts, values = self._accept(counts)
        out = self._call(values, counts, [1] * len(counts), starts)
        for b, own in enumerate(self.history):
            expected = torch.stack(self._seen(b, len(own), len(own) - 1)).double().mean(0)
            assert torch.allclose(out[b].double(), expected, atol=1e-5), f"request {b} lost a key"

    def draft(self) -> None:
        """Every level but the last, each launch with the rows of the levels before it."""
        shape, batch = self.shape, len(self.history)
        parents = torch.zeros(batch, shape.rows, dtype=torch.int64)
        for level in range(2, shape.depth):
            above = shape.level(level - 1)
            parents[:, shape.level(level)] = torch.randint(
                above.start, above.stop, (batch, shape.width)
            )
        related = tree.ancestors(tree.steps_up(shape, parents))
        values = torch.randn(batch, shape.rows, 1, HEAD_DIM)
        starts = torch.tensor([len(own) for own in self.history])
        for level in range(1, shape.draft_len):
            rows, asked = slice(1, 1 + level * shape.width), shape.level(level)
            out = self._call(
                values[:, rows].flatten(0, 1).contiguous(),
                [level * shape.width] * batch,
                [shape.width] * batch,
                starts,
                tree.ancestor_words(related[:, asked, rows]),
            ).view(batch, shape.width, HEAD_DIM)
            for b in range(batch):
                start = len(self.history[b])
                for i, row in enumerate(range(asked.start, asked.stop)):
                    seen = self._seen(b, start, start + level - 1)
                    while row != 0:  # the root is history: it was fed by the extension
                        seen.append(values[b, row, 0])
                        row = int(parents[b, row])
                    expected = torch.stack(seen).double().mean(0)
                    assert torch.allclose(out[b, i].double(), expected, atol=1e-5), (
                        f"request {b}, level {level}: lost or gained a key"
                    )

    def step(self, accepted: Sequence[int]) -> None:
        """``accepted[b]`` drafts of the step before were kept."""
        self.extend([count + 1 for count in accepted])
        self.draft()


shapes = st.builds(
    lambda n_sink, window, width, depth: (n_sink, window, TreeShape(width, depth)),
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(2, 7),
)


@settings(max_examples=40, deadline=None)
@given(
    shapes,
    st.booleans(),
    st.lists(st.integers(0, 150), min_size=1, max_size=3),
    st.integers(1, 200),
    st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=10),
    st.integers(0, 2**31),
)
def test_tree_rows_see_sinks_window_and_ancestors_step_after_step(
    shape: tuple[int, int, TreeShape],
    tight: bool,
    prompts: list[int],
    chunk: int,
    steps: list[list[int]],
    seed: int,
) -> None:
    """``tight``: no more spare slots than the launches need."""
    torch.manual_seed(seed)
    n_sink, window, drafts = shape
    spec = RingSpec.for_chain(n_sink, window, drafts.depth, drafts.width)
    if tight:
        largest_launch = (drafts.draft_len - 1) * drafts.width
        spec = RingSpec(n_sink, window, max(largest_launch - 1, 0))
    simulation = TreeDrafts(spec, drafts, prompts, chunk)
    for accepted in steps:
        simulation.step([min(n, drafts.draft_len) for n in accepted[: len(prompts)]])


@pytest.mark.parametrize("ring", [(0, 1), (0, 5), (4, 8), (3, 1)], ids=str)
@pytest.mark.parametrize("drafts", [TreeShape(2, 4), TreeShape(3, 3)], ids=str)
def test_every_accept_count_at_every_wrap(ring: tuple[int, int], drafts: TreeShape) -> None:
    """A step at every position of two turns of the ring, each number of drafts kept after it."""
    torch.manual_seed(0)
    spec = RingSpec.for_chain(*ring, drafts.depth, drafts.width)
    counts = range(drafts.draft_len + 1)
    prompts = [prompt for prompt in range(2 * spec.capacity + 2) for _ in counts]
    simulation = TreeDrafts(spec, drafts, prompts, chunk=7)
    simulation.step([0] * len(prompts))
    simulation.step([*counts] * (len(prompts) // len(counts)))
    simulation.extend([1] * len(prompts))


@pytest.mark.parametrize("n_sink", [0, 3])
@pytest.mark.parametrize("drafts", [TreeShape(1, 6), TreeShape(3, 6)], ids=str)
@pytest.mark.parametrize("boundary", [64, 2048])
def test_ancestors_older_than_the_window_are_seen(
    n_sink: int, drafts: TreeShape, boundary: int
) -> None:
    """A window shorter than the tree is deep, at every position about a block of keys of the CPU
    kernel (64) and about a chunk (2048)."""
    torch.manual_seed(0)
    spec = RingSpec.for_chain(n_sink, 1, drafts.depth, drafts.width)
    prompts = range(boundary - 2 * drafts.rows, boundary + 2)
    TreeDrafts(spec, drafts, prompts, chunk=200).step([0] * len(prompts))


def test_one_row_more_than_the_spare_allows_would_take_a_visible_key() -> None:
    """The bound is the least that works: beyond it the operator refuses."""
    n_sink, window, spare = 2, 6, 4
    spec, start = RingSpec(n_sink, window, spare), 50
    assert spec.slot(start + spare + 1) == spec.slot(start - window + 1)
    simulation = TreeDrafts(spec, TreeShape(1, 2), [start], chunk=50)
    for n_rows in (spare + 1, spare + 2):
        arguments = (
            torch.randn(n_rows, 1, HEAD_DIM),
            [n_rows],
            [1],
            torch.tensor([start]),
            torch.ones(1, 1, dtype=torch.int32),
        )
        if n_rows == spare + 1:
            assert torch.isfinite(simulation._call(*arguments)).all()
            continue
        with pytest.raises(ValueError, match="6 tree rows but the ring spares 4 slots"):
            simulation._call(*arguments)
