"""``wmtp bench run`` against a real Triton server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from triton_server import DEPTH, N_SINK, WINDOW, Server

from tllm_wmtp import LLM, SamplingParams
from tllm_wmtp.bench import inputs
from tllm_wmtp.bench.sweep.cells import Cell, InputConfig, SamplingConfig, TargetConfig
from tllm_wmtp.bench.sweep.protocol import Answer
from tllm_wmtp.bench.sweep.results import output_digest
from tllm_wmtp.bench.sweep.rows import Row
from tllm_wmtp.bench.sweep.runner import run_suite
from tllm_wmtp.bench.sweep.suite import Suite
from tllm_wmtp.errors import WmtpError

CONTEXT, TOKENS = 600, 24


class Failures:
    """Watches a run for what fails."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def begin(self, cells: Sequence[Cell], skipped: int) -> None: ...

    def advance(self, cost: float) -> None: ...

    def done(self, cell: Cell, row: Row) -> None: ...

    def failed(self, cell: Cell, error: Exception) -> None:
        self.found.append(str(error))


@pytest.fixture
def cell(server: Server, checkpoint: Path) -> Cell:
    return Cell(
        target=TargetConfig("triton", f"127.0.0.1:{server.grpc_port}", "wmtp"),
        model=str(checkpoint),
        device="server",
        dtype="float32",
        arm="windowed",
        depth=DEPTH,
        window=WINDOW,
        n_sink=N_SINK,
        kv_dtype="float32",
        input=InputConfig("niah_single", difficulty="easy"),
        context=CONTEXT,
        batch=2,
        repeats=1,
        seed=0,
        sampling=SamplingConfig(max_tokens=TOKENS, ignore_eos=True),
        prefill_chunk=0,
    )


def suite(*cells: Cell) -> Suite:
    return Suite(cells, {cell.model: Path(cell.model) for cell in cells})


def test_streams_give_the_engines_tokens_and_its_histogram(
    cell: Cell, llm: LLM, tmp_path: Path
) -> None:
    watch = Failures()
    outcome = run_suite(suite(cell), tmp_path, watch)
    assert watch.found == []
    (row,) = outcome.rows
    prompts = inputs.prompts("niah_single", llm.tokenizer, CONTEXT, 2, 0, difficulty="easy")
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    expected = llm.generate([prompt.ids for prompt in prompts], params)
    ids = [output.outputs[0].token_ids for output in expected]
    assert row.output_digest == output_digest(
        [Answer(0, 0, 0, 0, token_ids=tuple(each)) for each in ids]
    )
    histograms = [output.metrics.accepted_histogram for output in expected if output.metrics]
    assert row.accepted_histogram == [sum(column) for column in zip(*histograms, strict=True)]
    assert row.alpha is not None
    assert len(row.alpha) == DEPTH - 1
    assert (row.n_runs, row.prompt_tokens, row.output_tokens) == (2, 2 * CONTEXT, 2 * TOKENS)
    assert row.score == 0.0  # of random weights
    assert row.tpot_ms == pytest.approx(row.t_iter_ms * row.b_eff / row.al)  # type: ignore[operator]


def test_what_the_server_does_not_run_fails_its_cell(cell: Cell, tmp_path: Path) -> None:
    watch = Failures()
    other = replace(cell, batch=1, window=WINDOW + 1)
    fine = replace(cell, batch=1, seed=7)
    outcome = run_suite(suite(other, fine), tmp_path, watch)
    assert [row.seed for row in outcome.rows] == [7]
    (message,) = watch.found
    assert f"window {WINDOW + 1}" in message


def test_a_model_that_is_not_there_is_refused_before_any_cell(cell: Cell, tmp_path: Path) -> None:
    absent = replace(cell, target=replace(cell.target, model="absent"))
    with pytest.raises(WmtpError, match="absent"):
        run_suite(suite(absent), tmp_path, Failures())
