"""What a verify of tree rows computes, against float64 runs of every path as a chain."""

from __future__ import annotations

import math

import pytest
import torch

from tllm_wmtp import ops, tree
from tllm_wmtp.models.layers.convolution import causal_convolution
from tllm_wmtp.models.layers.gated_delta import tree_gated_delta_rows
from tllm_wmtp.tree import TreeShape

SHAPES = [TreeShape(1, 5), TreeShape(2, 4), TreeShape(4, 7), TreeShape(9, 5)]
BATCH = 3


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random_parents(shape: TreeShape, batch: int) -> torch.Tensor:
    """Every row follows a random row of the level before."""
    parents = torch.zeros(batch, shape.rows, dtype=torch.int64)
    for level in range(2, shape.depth):
        above, rows = shape.level(level - 1), shape.level(level)
        parents[:, rows] = torch.randint(above.start, above.stop, (batch, shape.width))
    return parents


def walk(parents: torch.Tensor, row: int) -> list[int]:
    """Rows from the root to ``row``, by following one request's parents."""
    path = [row]
    while path[0] != 0:
        path.insert(0, int(parents[path[0]]))
    return path


# --- Recurrent layers ----------------------------------------------------------------------------


def delta_inputs(shape: TreeShape, dims: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    key_heads, value_heads, key_dim, value_dim = dims
    rows = (BATCH, shape.rows)
    return {
        "q": torch.randn(*rows, key_heads, key_dim),
        "k": torch.randn(*rows, key_heads, key_dim),
        "v": torch.randn(*rows, value_heads, value_dim),
        "g": -4 * torch.rand(*rows, value_heads) ** 4,
        "beta": torch.rand(*rows, value_heads),
        "state": torch.randn(BATCH, value_heads, key_dim, value_dim),
    }


def chain_of(
    x: dict[str, torch.Tensor], b: int, head: int, path: list[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Outputs and deltas of a path's rows and the state after them: the recurrence in float64."""
    key_head = head // (x["v"].shape[2] // x["k"].shape[2])
    state = x["state"][b, head].double()
    outs, deltas = [], []
    for row in path:
        query, key = x["q"][b, row, key_head].double(), x["k"][b, row, key_head].double()
        query = query / math.sqrt(float(query @ query) + 1e-6) / math.sqrt(query.numel())
        key = key / math.sqrt(float(key @ key) + 1e-6)
        state = state * math.exp(float(x["g"][b, row, head]))
        delta = float(x["beta"][b, row, head]) * (x["v"][b, row, head].double() - state.T @ key)
        state = state + torch.outer(key, delta)
        outs.append(state.T @ query)
        deltas.append(delta)
    return outs, deltas, state


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dims", [(1, 1, 24, 16), (2, 4, 16, 32)], ids=str)
def test_every_path_of_a_tree_is_a_chain_of_the_gated_delta_rule(
    shape: TreeShape, dims: tuple[int, int, int, int]
) -> None:
    x = delta_inputs(shape, dims)
    parents = random_parents(shape, BATCH)
    related = tree.ancestors(tree.steps_up(shape, parents))
    before = x["state"].clone()
    out, delta = tree_gated_delta_rows(**x, ancestors=related)
    assert torch.equal(x["state"], before)
    for b in range(BATCH):
        for row in range(shape.rows):
            for head in range(dims[1]):
                outs, deltas, _ = chain_of(x, b, head, walk(parents[b], row))
                assert (out[b, row, head].double() - outs[-1]).abs().max() < 2e-5
                assert (delta[b, row, head].double() - deltas[-1]).abs().max() < 2e-5


def test_an_accepted_path_is_committed_from_its_gathered_rows() -> None:
    shape, dims = TreeShape(3, 5), (2, 4, 16, 32)
    x = delta_inputs(shape, dims)
    parents = random_parents(shape, BATCH)
    steps = tree.steps_up(shape, parents)
    _, delta = tree_gated_delta_rows(**x, ancestors=tree.ancestors(steps))
    leaf = torch.tensor([0, 5, shape.rows - 1])
    rows, counts = tree.path_to(steps, shape.levels(), leaf)
    of_path = [t[torch.arange(BATCH)[:, None], rows] for t in (x["k"], x["g"], delta)]
    pool = torch.randn(5, *x["state"].shape[1:])
    slots = torch.tensor([3, 0, 4], dtype=torch.int32)
    pool[slots.long()] = x["state"]
    ops.gated_delta_commit(*of_path, pool, slots, counts.int())
    for b in range(BATCH):
        for head in range(dims[1]):
            _, _, state = chain_of(x, b, head, walk(parents[b], int(leaf[b])))
            assert (pool[int(slots[b]), head].double() - state).abs().max() < 2e-5


def test_a_tree_of_width_one_is_what_the_verify_operator_computes() -> None:
    shape, dims = TreeShape(1, 7), (2, 4, 16, 32)
    x = delta_inputs(shape, dims)
    related = torch.ones(BATCH, 7, 7, dtype=torch.bool).tril()
    out, delta = tree_gated_delta_rows(**x, ancestors=related)
    expected = ops.gated_delta_rows(**x, slots=torch.arange(BATCH, dtype=torch.int32))
    assert torch.allclose(out, expected[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(delta, expected[1], rtol=1e-4, atol=1e-5)


def test_a_convolution_over_a_tree_is_that_of_every_path() -> None:
    shape, kernel, channels = TreeShape(3, 6), 4, 5
    parents = random_parents(shape, BATCH)
    history = torch.randn(BATCH, kernel - 1, channels)
    mixed = torch.randn(BATCH, shape.rows, channels)
    weight = torch.randn(channels, kernel)
    index = tree.convolution_index(tree.steps_up(shape, parents), shape.levels(), kernel)
    window = torch.cat((history, mixed), dim=1)
    out = causal_convolution(window[torch.arange(BATCH)[:, None, None], index], weight)
    conv = torch.nn.functional.conv1d
    for b in range(BATCH):
        for row in range(shape.rows):
            path = torch.cat((history[b], mixed[b, walk(parents[b], row)])).double()
            of_path = conv(path.T[None], weight.double()[:, None], groups=channels)
            assert (out[b, row].double() - of_path[0, :, -1]).abs().max() < 1e-5


# --- Compaction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_an_accepted_path_moves_and_everything_else_stays(
    page_size: int, dtype: torch.dtype
) -> None:
    shape, layers, heads, head_dim = TreeShape(4, 6), 2, 2, 8
    starts = torch.tensor([0, 3, 62, 127, 9])
    batch, max_pages = starts.numel(), -(-(127 + shape.rows) // page_size)
    n_pages = batch * max_pages + 3
    table = torch.randperm(n_pages)[: batch * max_pages].reshape(batch, max_pages).int()
    pools = [torch.randn(n_pages, page_size, heads, head_dim).to(dtype) for _ in range(2 * layers)]
    before = [pool.float().clone() for pool in pools]
    steps = tree.steps_up(shape, random_parents(shape, batch))
    leaf = torch.tensor([shape.rows - 1, 0, 7, shape.rows - 3, 20])
    rows, counts = tree.path_to(steps, shape.levels(), leaf)
    counts[-1] = 0
    ops.paged_move(pools[:layers], pools[layers:], table, starts, rows, counts)
    # By position: {(page, place): where what it holds came from}.
    origin = {(p, i): (p, i) for p in range(n_pages) for i in range(page_size)}

    def cell(b: int, position: int) -> tuple[int, int]:
        return int(table[b, position // page_size]), position % page_size

    for b, start in enumerate(starts.tolist()):
        for t in range(int(counts[b])):
            origin[cell(b, start + t)] = cell(b, start + int(rows[b, t]))
    assert sum(to != came for to, came in origin.items()) >= 8
    for pool, old in zip(pools, before, strict=True):
        for (page, place), (from_page, from_place) in origin.items():
            assert torch.equal(pool[page, place].float(), old[from_page, from_place])
