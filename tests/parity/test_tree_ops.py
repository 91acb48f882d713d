"""What a verify of tree rows computes, against float64 runs of every path as a chain."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tllm_wmtp import ops, tree
from tllm_wmtp.models.layers.convolution import causal_convolution
from tllm_wmtp.models.layers.gated_delta import tree_gated_delta_rows
from tllm_wmtp.tree import TreeShape

FLOAT, HALF = torch.float32, torch.bfloat16
SHAPES = [TreeShape(1, 5), TreeShape(2, 4), TreeShape(4, 7), TreeShape(9, 5)]
BATCH = 3


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=ops.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa("auto")


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


# --- Full attention ------------------------------------------------------------------------------


class PagedTrees:
    """Requests of given lengths, a tree of rows stored after each, on pages of random order.

    Cells that hold no position are NaN, as are the table's unused pages.
    """

    def __init__(
        self,
        shape: TreeShape,
        lengths: list[int],
        dtypes: tuple[torch.dtype, torch.dtype] = (FLOAT, FLOAT),
        heads: tuple[int, int, int] = (6, 2, 16),
        page_size: int = 12,
    ) -> None:
        self.shape, self.lengths, self.page_size = shape, lengths, page_size
        self.n_query_heads, n_kv_heads, self.head_dim = heads
        batch, rows = len(lengths), shape.rows
        self.parents = random_parents(shape, batch)
        steps = tree.steps_up(shape, self.parents)
        self.mask = tree.ancestor_words(tree.ancestors(steps))
        self.starts = torch.tensor(lengths)
        self.offsets = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32)
        self.q = torch.randn(batch * rows, self.n_query_heads, self.head_dim).to(dtypes[0])
        used = [-(-(length + rows) // page_size) for length in lengths]
        n_pages = sum(used) + 2
        order = torch.randperm(n_pages).int()
        # A page that no row reaches is never looked up.
        self.table = torch.full((batch, max(used) + 1), 1 << 30, dtype=torch.int32)
        pages = [
            torch.full((n_pages, page_size, n_kv_heads, self.head_dim), torch.nan, dtype=dtypes[1])
            for _ in range(2)
        ]
        self.k_pages, self.v_pages = pages
        self.history = []
        for b, length in enumerate(lengths):
            own = order[sum(used[:b]) : sum(used[: b + 1])]
            self.table[b, : own.numel()] = own
            k, v = (
                torch.randn(length + rows, n_kv_heads, self.head_dim).to(dtypes[1])
                for _ in range(2)
            )
            self.history.append((k, v))
            for position in range(length + rows):
                page, place = int(own[position // page_size]), position % page_size
                self.k_pages[page, place], self.v_pages[page, place] = k[position], v[position]

    def __call__(self, **changes: torch.Tensor | None) -> torch.Tensor:
        arguments = {
            "query_positions": torch.zeros(self.q.shape[0], dtype=torch.int64),
            "ancestor_mask": self.mask,
            "tree_starts": self.starts,
        } | changes
        return ops.full_attention(
            self.q,
            self.k_pages,
            self.v_pages,
            self.table,
            self.offsets,
            scale=self.head_dim**-0.5,
            **arguments,
        )

    def check_row(self, out: torch.Tensor, b: int, row: int) -> None:
        """A row sees what precedes the tree and its own path: float64, position by position."""
        length = self.lengths[b]
        seen = list(range(length)) + [length + r for r in walk(self.parents[b], row)]
        at = b * self.shape.rows + row
        k, v = (x[seen].double() for x in self.history[b])
        group = self.n_query_heads // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("hd,shd->hs", self.q[at].double(), k) * self.head_dim**-0.5
        weights = scores.softmax(dim=-1)
        expected = torch.einsum("hs,shd->hd", weights, v)
        magnitude = torch.einsum("hs,shd->hd", weights, v.abs())
        tolerance = 2e-6 if out.dtype == FLOAT else 2.0**-7
        assert ((out[at].double() - expected).abs() / magnitude).max().item() < tolerance

    def check(self) -> None:
        out = self()
        for b in range(len(self.lengths)):
            for row in range(self.shape.rows):
                self.check_row(out, b, row)


DTYPES = [(FLOAT, FLOAT), (FLOAT, HALF), (HALF, HALF), (HALF, FLOAT)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [TreeShape(2, 4), TreeShape(4, 7), TreeShape(9, 5)], ids=str)
def test_verified_tree_rows_see_the_history_and_their_path(
    isa: str, shape: TreeShape, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Trees of 7, 25 (split over keys) and 37 rows (split over rows), around block boundaries."""
    PagedTrees(shape, [0, 40, 64, 130], dtypes).check()


@pytest.mark.parametrize("heads", [(1, 1, 8), (16, 2, 64), (4, 4, 72)], ids=str)
def test_tree_rows_of_other_head_shapes_and_pages(heads: tuple[int, int, int]) -> None:
    for page_size in (1, 5, 64):
        PagedTrees(TreeShape(3, 4), [7, 100], heads=heads, page_size=page_size).check()


def test_tree_rows_across_a_chunk_of_keys_and_a_word_of_the_mask() -> None:
    """Partial states merge at 2,048 keys; a mask of 71 rows has three words."""
    trees = PagedTrees(TreeShape(10, 8), [2040, 2047, 4090])
    out = trees()
    for b in range(3):
        for row in (0, 1, 9, 10, 31, 32, 63, 64, 70):
            trees.check_row(out, b, row)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_verified_chain_mask_is_bit_identical_to_no_mask(
    isa: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    chains = PagedTrees(TreeShape(1, 7), [0, 60, 150], dtypes)
    positions = (chains.starts[:, None] + torch.arange(7)).flatten()
    nothing = {"ancestor_mask": None, "tree_starts": None}
    assert torch.equal(chains(), chains(query_positions=positions, **nothing))


def test_a_tree_row_is_what_its_path_gives_as_a_chain() -> None:
    """Equal to rounding: the path's keys lie elsewhere in the blocks of keys."""
    trees = PagedTrees(TreeShape(4, 5), [61])
    path = walk(trees.parents[0], trees.shape.rows - 1)
    alone = PagedTrees(TreeShape(1, 5), [61])
    alone.q = trees.q[path].contiguous()
    seen = [*range(61), *(61 + row for row in path)]
    for position, came_from in enumerate(seen):
        to = int(alone.table[0, position // 12]), position % 12
        at = int(trees.table[0, came_from // 12]), came_from % 12
        alone.k_pages[to], alone.v_pages[to] = trees.k_pages[at], trees.v_pages[at]
    assert torch.allclose(alone(), trees()[path], rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("page_size", [1, 7, 64])
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
