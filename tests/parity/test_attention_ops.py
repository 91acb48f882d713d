"""CPU operators against float64 references that follow the definitions, position by position."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tllm_wmtp import ops
from tllm_wmtp.ring import RingSpec

FLOAT, HALF = torch.float32, torch.bfloat16
DTYPES = [(FLOAT, FLOAT), (FLOAT, HALF), (HALF, HALF), (HALF, FLOAT)]


@pytest.fixture(params=ops.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa("auto")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: list[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query row [Hq, D] over listed positions, float64; also the sum of |weight * value|."""
    keys, values = k[positions].double(), v[positions].double()
    group = q.shape[0] // k.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    weights = (torch.einsum("hd,shd->hs", q.double(), keys) * scale).softmax(dim=-1)
    return (
        torch.einsum("hs,shd->hd", weights, values),
        torch.einsum("hs,shd->hd", weights, values.abs()),
    )


def windowed_positions(query: int, n_sink: int, window: int) -> list[int]:
    return [p for p in range(query + 1) if p < n_sink or query - window < p]


def assert_close(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """2e-6 of the summed magnitudes in float32; two bfloat16 roundings otherwise."""
    tolerance = 2e-6 if out.dtype == FLOAT else 2.0**-7
    error = (out.double() - expected).abs() / magnitude
    assert error.max().item() < tolerance


class Ragged:
    """Requests whose next query is at the given position, on a ring of NaN."""

    def __init__(
        self,
        spec: RingSpec,
        queries: list[int],
        heads: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        n_rows: int,
    ) -> None:
        self.spec, self.n_rows = spec, n_rows
        self.n_query_heads, self.n_kv_heads, self.head_dim = heads
        self.q_dtype, self.kv_dtype = dtypes
        # The last of n_rows appended rows is the query.
        self.starts = [max(0, query + 1 - n_rows) for query in queries]
        self.counts = [query + 1 - start for query, start in zip(queries, self.starts, strict=True)]
        shape = (self.n_kv_heads, self.head_dim)
        self.history = [
            (
                torch.randn(q + 1, *shape).to(self.kv_dtype),
                torch.randn(q + 1, *shape).to(self.kv_dtype),
            )
            for q in queries
        ]
        ring = (len(queries) + 1, spec.capacity, *shape)
        self.ring_k = torch.full(ring, torch.nan, dtype=self.kv_dtype)
        self.ring_v = torch.full(ring, torch.nan, dtype=self.kv_dtype)
        self.lanes = torch.arange(len(queries), dtype=torch.int32).flip(0).contiguous()

    def rows(self, begin: list[int], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        spans = list(zip(self.history, begin, counts, strict=True))
        return (
            torch.cat([k[b : b + n] for (k, _), b, n in spans]),
            torch.cat([v[b : b + n] for (_, v), b, n in spans]),
        )

    def prefill(self, chunk: int) -> None:
        done = [0] * len(self.starts)
        while done != self.starts:
            counts = [min(chunk, s - d) for s, d in zip(self.starts, done, strict=True)]
            k, v = self.rows(done, counts)
            ops.ring_append(
                k,
                v,
                self.ring_k,
                self.ring_v,
                offsets(counts),
                int64(*done),
                self.lanes,
                self.spec.n_sink,
            )
            done = [d + n for d, n in zip(done, counts, strict=True)]

    def answer(self, n_queries: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        queries = [min(n_queries, n) for n in self.counts]
        q = torch.randn(sum(queries), self.n_query_heads, self.head_dim).to(self.q_dtype)
        k, v = self.rows(self.starts, self.counts)
        out = ops.windowed_draft_attention(
            q,
            k,
            v,
            self.ring_k,
            self.ring_v,
            offsets(self.counts),
            offsets(queries),
            int64(*self.starts),
            self.lanes,
            self.spec.n_sink,
            self.spec.window,
            self.head_dim**-0.5,
        )
        return q, out, queries

    def check(self, n_queries: int) -> None:
        q, out, queries = self.answer(n_queries)
        row = 0
        for (k, v), count in zip(self.history, queries, strict=True):
            for i in range(count):
                query = k.shape[0] - count + i
                visible = windowed_positions(query, self.spec.n_sink, self.spec.window)
                assert_close(out[row], *attend(q[row], k, v, visible, self.head_dim**-0.5))
                row += 1


def boundaries(spec: RingSpec) -> list[int]:
    marks = {0, spec.n_sink, spec.window, spec.n_sink + spec.window, spec.capacity}
    marks |= {2 * spec.capacity - spec.n_sink, 5 * spec.capacity + 3}
    return sorted({max(0, mark + delta) for mark in marks for delta in (-1, 0, 1)})


@pytest.mark.parametrize("spec", [RingSpec(4, 20, 7), RingSpec(0, 1, 7), RingSpec(3, 130, 8)])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_windowed_rows_at_every_boundary(
    isa: str, spec: RingSpec, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    batch = Ragged(spec, boundaries(spec), (8, 2, 16), dtypes, n_rows=7)
    batch.prefill(chunk=11)
    batch.check(n_queries=7)


@pytest.mark.parametrize("chunk", [1, 5, 64, 1000])
def test_prefill_chunk_of_any_size_keeps_the_window(chunk: int) -> None:
    spec = RingSpec(4, 20, 7)
    batch = Ragged(spec, [0, 9, 90, 300], (4, 4, 8), (FLOAT, FLOAT), n_rows=3)
    batch.prefill(chunk)
    batch.check(n_queries=1)


def test_one_call_may_append_more_rows_than_the_ring_holds() -> None:
    batch = Ragged(RingSpec(4, 20, 7), [200], (4, 2, 8), (FLOAT, FLOAT), n_rows=150)
    batch.prefill(chunk=50)
    batch.check(n_queries=8)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_windowed_head_shapes(isa: str, head_dim: int, group: int) -> None:
    for dtypes in DTYPES:
        batch = Ragged(RingSpec(2, 70, 4), [5, 160], (2 * group, 2, head_dim), dtypes, n_rows=3)
        batch.prefill(chunk=100)
        batch.check(n_queries=2)


def shuffled_pages(
    k: torch.Tensor, v: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows in pages of random order among pages of NaN, with NaN after the last row."""
    n_used = -(-k.shape[0] // page_size)
    n_pages = 2 * n_used + 1
    table = torch.randperm(n_pages)[:n_used].int().reshape(1, -1).contiguous()
    pages = [
        torch.full((n_pages, page_size, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (k, v)
    ]
    ops.paged_append(k, v, *pages, table, int32(0, k.shape[0]), int64(0))
    return pages[0], pages[1], table


@pytest.mark.parametrize("n_rows", [1, 2, 7, 32, 300])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_full_rows_on_shuffled_pages(
    isa: str, n_rows: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    head_dim, n_keys = 32, 331
    k, v = (torch.randn(n_keys, 2, head_dim).to(dtypes[1]) for _ in range(2))
    q = torch.randn(n_rows, 6, head_dim).to(dtypes[0])
    k_pages, v_pages, table = shuffled_pages(k, v, 12)
    positions = torch.arange(n_keys - n_rows, n_keys)
    out = ops.full_attention(
        q, k_pages, v_pages, table, int32(0, n_rows), positions, head_dim**-0.5
    )
    for row in {0, n_rows // 2, n_rows - 1}:
        visible = list(range(int(positions[row]) + 1))
        assert_close(out[row], *attend(q[row], k, v, visible, head_dim**-0.5))


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_full_head_shapes(isa: str, head_dim: int, group: int) -> None:
    for q_dtype, kv_dtype in DTYPES:
        k, v = (torch.randn(1, 150, 2, head_dim).to(kv_dtype) for _ in range(2))
        q = torch.randn(3, 2 * group, head_dim).to(q_dtype)
        out = ops.full_attention(
            q, k, v, int32(0).reshape(1, 1), int32(0, 3), int64(147, 148, 149), head_dim**-0.5
        )
        for row in range(3):
            visible = list(range(148 + row))
            assert_close(out[row], *attend(q[row], k[0], v[0], visible, head_dim**-0.5))


def test_ragged_requests_do_not_see_each_other(isa: str) -> None:
    lengths, counts, head_dim = [1, 64, 65, 2500, 130], [1, 0, 5, 3, 40], 16
    caches = [torch.randn(2, n, 2, head_dim) for n in lengths]
    page_size, starts = 16, []
    pages = [torch.full((2, 1, page_size, 2, head_dim), torch.nan)]
    table = torch.full((len(lengths), -(-max(lengths) // page_size)), -1, dtype=torch.int32)
    for request, cache in enumerate(caches):
        n_pages = -(-lengths[request] // page_size)
        starts.append(sum(p.shape[1] for p in pages))
        padded = torch.full((2, n_pages * page_size, 2, head_dim), torch.nan)
        padded[:, : lengths[request]] = cache
        pages.append(padded.reshape(2, n_pages, page_size, 2, head_dim))
        table[request, :n_pages] = torch.arange(starts[-1], starts[-1] + n_pages)
    pool = torch.cat(pages, dim=1)
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)])
    q = torch.randn(sum(counts), 4, head_dim)
    out = ops.full_attention(
        q, pool[0].contiguous(), pool[1].contiguous(), table, offsets(counts), positions, 0.25
    )
    row = 0
    for cache, count in zip(caches, counts, strict=True):
        for _ in range(count):
            visible = list(range(int(positions[row]) + 1))
            assert_close(out[row], *attend(q[row], cache[0], cache[1], visible, 0.25))
            row += 1


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_row_is_bit_identical_however_it_is_computed(
    isa: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Alone, with others, split over keys or over rows, one thread or two, any page size."""
    head_dim, n_keys, n_rows = 64, 4300, 50
    k, v = (torch.randn(1, n_keys, 2, head_dim).to(dtypes[1]) for _ in range(2))
    q = torch.randn(n_rows, 8, head_dim).to(dtypes[0])
    positions = torch.arange(n_keys - n_rows, n_keys)
    one_page = int32(0).reshape(1, 1)

    def run(first: int, last: int) -> torch.Tensor:
        return ops.full_attention(
            q[first:last], k, v, one_page, int32(0, last - first), positions[first:last], 0.125
        )

    together = run(0, n_rows)
    assert torch.equal(run(n_rows - 7, n_rows), together[-7:])
    for row in (0, 20, n_rows - 1):
        assert torch.equal(run(row, row + 1), together[row : row + 1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(run(0, n_rows), together)
        assert torch.equal(run(n_rows - 7, n_rows), together[-7:])
    finally:
        torch.set_num_threads(threads)
    k_pages, v_pages, table = shuffled_pages(k[0], v[0], 48)
    paged = ops.full_attention(q, k_pages, v_pages, table, int32(0, n_rows), positions, 0.125)
    assert torch.equal(paged, together)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_windowed_is_bit_identical_to_full_while_everything_is_visible(
    isa: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    spec = RingSpec(4, 200, 8)
    for query in (6, 150, spec.n_sink + spec.window - 1):
        batch = Ragged(spec, [query], (8, 2, 64), dtypes, n_rows=7)
        batch.prefill(chunk=64)
        q, out, queries = batch.answer(7)
        k, v = batch.history[0]
        full = ops.full_attention(
            q,
            k.unsqueeze(0),
            v.unsqueeze(0),
            int32(0).reshape(1, 1),
            int32(0, queries[0]),
            torch.arange(query + 1 - queries[0], query + 1),
            64**-0.5,
        )
        assert torch.equal(out, full)


def test_tree_rows_see_history_and_their_ancestors(isa: str) -> None:
    n_sink, window, n_rows, head_dim = 2, 30, 40, 16
    spec = RingSpec(n_sink, window, n_rows)
    for start in (0, 3, 31, 100, 163):
        parents = [-1] + [int(torch.randint(-1, i, ())) for i in range(1, n_rows)]
        ancestors: list[set[int]] = []
        for i, parent in enumerate(parents):
            ancestors.append({i} | (ancestors[parent] if parent >= 0 else set()))
        words = torch.zeros(n_rows, 2, dtype=torch.int64)
        for i, row in enumerate(ancestors):
            for j in row:
                words[i, j // 32] |= 1 << (j % 32)
        mask = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        k, v = torch.randn(start + n_rows, 2, head_dim), torch.randn(start + n_rows, 2, head_dim)
        ring = [torch.full((1, spec.capacity, 2, head_dim), torch.nan) for _ in range(2)]
        lane = int32(0)
        ops.ring_append(k[:start], v[:start], *ring, int32(0, start), int64(0), lane, n_sink)
        q = torch.randn(n_rows, 4, head_dim)
        one = int32(0, n_rows)
        out = ops.windowed_draft_attention(
            q, k[start:], v[start:], *ring, one, one, int64(start), lane, n_sink, window, 0.25, mask
        )
        for i in range(n_rows):
            logical = start + len(ancestors[i]) - 1
            visible = [p for p in range(start) if p < n_sink or p > logical - window]
            visible += sorted(start + j for j in ancestors[i])
            assert_close(out[i], *attend(q[i], k, v, visible, 0.25))


def test_a_chain_mask_equals_no_mask() -> None:
    spec, start, n_rows = RingSpec(2, 30, 8), 77, 7
    k, v = torch.randn(start + n_rows, 2, 16), torch.randn(start + n_rows, 2, 16)
    q, one, lane = torch.randn(n_rows, 4, 16), int32(0, n_rows), int32(0)
    chain = torch.tensor([[(1 << (i + 1)) - 1] for i in range(n_rows)], dtype=torch.int32)
    outs = []
    for mask in (None, chain):
        ring = [torch.full((1, spec.capacity, 2, 16), torch.nan) for _ in range(2)]
        ops.ring_append(k[:start], v[:start], *ring, int32(0, start), int64(0), lane, 2)
        outs.append(
            ops.windowed_draft_attention(
                q, k[start:], v[start:], *ring, one, one, int64(start), lane, 2, 30, 0.25, mask
            )
        )
    assert torch.equal(*outs)


def test_large_scores_do_not_overflow(isa: str) -> None:
    k, v = torch.randn(1, 300, 1, 16) * 100, torch.randn(1, 300, 1, 16)
    q = torch.randn(1, 1, 16) * 100
    out = ops.full_attention(q, k, v, int32(0).reshape(1, 1), int32(0, 1), int64(299), 1.0)
    expected, _ = attend(q[0], k[0], v[0], list(range(300)), 1.0)
    assert torch.allclose(out[0].double(), expected, atol=1e-2)
    assert torch.isfinite(out).all()


def delta_inputs(n_rows: int, dims: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    n_key_heads, n_value_heads, key_dim, value_dim = dims
    batch = 3
    return {
        "q": torch.randn(batch, n_rows, n_key_heads, key_dim),
        "k": torch.randn(batch, n_rows, n_key_heads, key_dim),
        "v": torch.randn(batch, n_rows, n_value_heads, value_dim),
        "g": -torch.rand(batch, n_rows, n_value_heads),
        "beta": torch.rand(batch, n_rows, n_value_heads),
        "state": torch.randn(5, n_value_heads, key_dim, value_dim),
        "slots": int32(4, 0, 2),
    }


def delta_reference(
    x: dict[str, torch.Tensor], counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of every row, and the states after counts[b] rows, float64."""
    q, k = x["q"].double(), x["k"].double()
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    out, states = torch.zeros_like(x["v"], dtype=torch.float64), x["state"].double()
    group = x["v"].shape[2] // k.shape[2]
    for b, slot in enumerate(x["slots"].tolist()):
        for h in range(x["v"].shape[2]):
            state = x["state"][slot, h].double()
            for t in range(q.shape[1]):
                key, query = k[b, t, h // group], q[b, t, h // group]
                state = state * x["g"][b, t, h].double().exp()
                delta = x["beta"][b, t, h].double() * (x["v"][b, t, h].double() - key @ state)
                state = state + torch.outer(key, delta)
                out[b, t, h] = query @ state
                if t + 1 == counts[b]:
                    states[slot, h] = state
    return out, states


DELTA_DIMS = [(2, 4, 32, 16), (1, 1, 128, 128), (2, 2, 20, 48), (2, 6, 64, 64)]


@pytest.mark.parametrize("dims", DELTA_DIMS)
@pytest.mark.parametrize("n_rows", [1, 7, 32])
def test_gated_delta_rows_and_commit(
    isa: str, n_rows: int, dims: tuple[int, int, int, int]
) -> None:
    x = delta_inputs(n_rows, dims)
    before = x["state"].clone()
    counts = [n_rows, 0, (n_rows + 1) // 2]
    expected, states = delta_reference(x, counts)
    out, delta = ops.gated_delta_rows(**x)
    assert torch.equal(x["state"], before)
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-5)
    ops.gated_delta_commit(x["k"], x["g"], delta, x["state"], x["slots"], int32(*counts))
    assert torch.allclose(x["state"].double(), states, rtol=1e-5, atol=1e-5)
    assert torch.equal(x["state"][[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("dims", DELTA_DIMS)
def test_commit_is_bit_identical_to_one_row_at_a_time(
    isa: str, dims: tuple[int, int, int, int]
) -> None:
    x = delta_inputs(7, dims)
    out, delta = ops.gated_delta_rows(**x)
    sequential = x["state"].clone()
    for t in range(7):
        row = {n: x[n][:, t : t + 1].contiguous() for n in ("q", "k", "v", "g", "beta")}
        row_out, row_delta = ops.gated_delta_rows(**row, state=sequential, slots=x["slots"])
        assert torch.equal(row_out[:, 0], out[:, t])
        assert torch.equal(row_delta[:, 0], delta[:, t])
        ops.gated_delta_commit(
            row["k"], row["g"], row_delta, sequential, x["slots"], int32(1, 1, 1)
        )
        replayed = x["state"].clone()
        count = int32(t + 1, t + 1, t + 1)
        ops.gated_delta_commit(x["k"], x["g"], delta, replayed, x["slots"], count)
        assert torch.equal(replayed, sequential)


def test_schemas_and_shape_functions_hold() -> None:
    q, k = torch.randn(2, 4, 16), torch.randn(1, 8, 2, 16)
    args = (q, k, k.clone(), int32(0).reshape(1, 1), int32(0, 2), int64(3, 4), 0.25)
    torch.library.opcheck(ops.full_attention, args, test_utils=("test_schema", "test_faketensor"))
    rows = torch.randn(2, 2, 16)
    ring = (rows, rows.clone(), k.clone(), k.clone(), int32(0, 2), int64(0), int32(0), 1)
    torch.library.opcheck(ops.ring_append, ring, test_utils=("test_schema", "test_faketensor"))
    x = delta_inputs(2, (1, 1, 16, 16))
    torch.library.opcheck(
        ops.gated_delta_rows, tuple(x.values()), test_utils=("test_schema", "test_faketensor")
    )
