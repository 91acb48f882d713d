"""The file of rows: what a row may hold, how it is read back, and what survives a killed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from tllm_wmtp.bench.sweep.cells import Cell, InputConfig, SamplingConfig, TargetConfig
from tllm_wmtp.bench.sweep.protocol import Answer, Iteration
from tllm_wmtp.bench.sweep.results import differing, output_digest, row_of
from tllm_wmtp.bench.sweep.rows import Row, read_rows
from tllm_wmtp.bench.sweep.store import RowFile
from tllm_wmtp.bench.sweep.target import Floor, Measured
from tllm_wmtp.errors import ConfigError

ABOUT = {
    "date": "2000-01-02",
    "device": "cpu",
    "processor": "a processor",
    "threads": 2,
    "isa": "avx2",
}
CELL = Cell(
    target=TargetConfig(),
    model="tiny",
    device="cpu",
    dtype="float32",
    arm="windowed",
    depth=3,
    window=48,
    n_sink=4,
    kv_dtype="bfloat16",
    input=InputConfig("logs"),
    context=1000,
    batch=1,
    repeats=2,
    seed=5,
    sampling=SamplingConfig(max_tokens=9),
    prefill_chunk=2048,
)
#: The keys that readers of results rely on.
KEYS: list[str] = """
benchmark schema config_hash config arm model target input difficulty context depth window n_sink
dtype kv_dtype batch max_tokens temperature seed date device processor threads isa n_runs
prompt_tokens output_tokens steps steps_kept steps_clipped steps_ramp screened accepted_histogram
alpha al al_interval b_eff t_iter_ms t_iter_ms_interval tpot_ms tpot_ms_interval tokens_per_s ttft_s
step_ms draft_ms verify_ms ctx_ms fwd_ms draft_kv_bytes bytes_moved floor_ms fraction_of_floor
read_bandwidth_gb_per_s score output_digest missing
""".split()  # noqa: SIM905


class Unscored:
    scoring = "none"
    answers = ()


def measured(**changes: Any) -> Measured:
    """Two requests: steps of 10 ms, of which 6 are the draft's, accept 2, 2, 0 and 2, 1, 1."""
    answers = [
        Answer(1000, 8, 3, 7, 0.5, (1, 2, 3), "a b", (1, 0, 2), (3, 2), 4096),
        Answer(1000, 8, 3, 7, 0.7, (4, 5, 6), "c d", (0, 2, 1), (3, 3), 4000),
    ]
    iterations = [
        Iteration(0.010, 1, count, draft_s=0.006, verify_s=0.004, ctx_s=0.004, fwd_s=0.002)
        for count in (3, 3, 1, 3, 2, 2)
    ]
    options: dict[str, Any] = {"answers": answers, "iterations": iterations}
    return Measured(
        **{"prompts": [Unscored()] * 2, "floor": Floor(10_000_000, 4e9), **options, **changes}
    )


def row(**changes: Any) -> Row:
    return replace(row_of(CELL, measured(), ABOUT), **changes)


def test_a_row_has_the_agreed_keys_in_their_order() -> None:
    assert [field.name for field in fields(Row)] == KEYS
    assert list(json.loads(row().line())) == KEYS


def test_a_row_by_hand() -> None:
    found = row()
    assert found.config_hash == CELL.digest
    assert found.config["input"]["task"] == "logs"
    assert (found.n_runs, found.prompt_tokens, found.output_tokens) == (2, 2000, 16)
    assert (found.steps, found.steps_kept, found.steps_ramp, found.steps_clipped) == (6, 6, 0, 0)
    assert found.accepted_histogram == [1, 2, 3]
    assert found.al == pytest.approx(14 / 6)
    assert found.alpha is not None
    assert [(each["value"], each["trials"]) for each in found.alpha] == [(5 / 6, 6), (3 / 5, 5)]
    assert found.b_eff == 1
    assert (found.t_iter_ms, found.step_ms) == (pytest.approx(10), pytest.approx(10))
    assert found.tpot_ms == pytest.approx(60 / 14)
    assert found.tokens_per_s == pytest.approx(1400 / 6)
    assert found.ttft_s == pytest.approx(0.6)
    phases = (found.draft_ms, found.verify_ms, found.ctx_ms, found.fwd_ms)
    assert phases == pytest.approx((6, 4, 4, 2))
    assert found.draft_kv_bytes == 4096
    assert found.floor_ms == pytest.approx(2.5)
    assert found.fraction_of_floor == pytest.approx(0.25)
    assert found.read_bandwidth_gb_per_s == pytest.approx(4.0)
    assert found.score is None
    assert found.missing == {"score": "the task has no expected answer"}


def test_answers_in_degenerate_repetition_do_not_count_for_the_acceptance() -> None:
    first, second = measured().answers
    loop = replace(second, token_ids=(9,) * 40)
    found = row_of(CELL, measured(answers=[first, loop]), ABOUT)
    assert (found.screened, found.accepted_histogram, found.n_runs) == (1, [1, 0, 2], 2)
    assert found.al == pytest.approx(7 / 3)
    assert found.al_interval is None
    both = row_of(CELL, measured(answers=[loop, loop]), ABOUT)
    assert (both.screened, both.al, both.tpot_ms) == (2, None, None)
    assert both.t_iter_ms == pytest.approx(10)
    assert "degenerate" in both.missing["al"]
    assert "degenerate" in both.missing["tpot_ms"]


def test_a_model_is_called_by_its_folder() -> None:
    found = row_of(replace(CELL, model="checkpoints/q35"), measured(), ABOUT)
    assert (found.model, found.config["model"]) == ("q35", "checkpoints/q35")


def test_words_are_screened_where_token_ids_are_unseen() -> None:
    first, second = (replace(each, token_ids=None) for each in measured().answers)
    loop = replace(second, text="no " * 40)
    assert row_of(CELL, measured(answers=[first, loop]), ABOUT).screened == 1


def test_a_cell_without_steps_says_so() -> None:
    single = [Answer(1000, 1, 0, 0, 0.5, (1,), "a", (0, 0, 0), (0, 0), 0)]
    found = row_of(CELL, measured(answers=single, iterations=[], prompts=[Unscored()]), ABOUT)
    assert found.al is None
    assert found.b_eff is None
    assert "no step" in found.missing["tpot_ms"]
    assert found.missing.keys() == {name for name in KEYS if getattr(found, name) is None}


def test_the_digest_is_of_all_ids_in_order() -> None:
    first, second = measured().answers
    digest = output_digest([first, second])
    assert digest == output_digest([first, second])
    assert digest != output_digest([second, first])
    moved = [replace(first, token_ids=(1, 2)), replace(second, token_ids=(3, 4, 5, 6))]
    assert digest != output_digest(moved)
    assert output_digest([first, replace(second, token_ids=None)]) is None


def test_outputs_must_agree_whatever_the_arm() -> None:
    def of(**changes: Any) -> Row:
        cell = replace(CELL, **changes)
        return row_of(cell, measured(), ABOUT)

    dense = of(arm="dense", depth=1, window=None, n_sink=0)
    other = replace(of(), output_digest="another")
    assert differing([dense, of(), of(window=96)]) == []
    assert differing([dense, of(), other]) == [[dense, of(), other]]
    apart = [of(seed=6), of(context=999), of(kv_dtype="float32"), of(batch=2, repeats=1)]
    assert all(differing([other, each]) == [] for each in apart)
    warm = SamplingConfig(max_tokens=9, temperature=0.5)
    assert differing([of(sampling=warm), replace(of(sampling=warm), output_digest="b")]) == []


# What is refused.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"al": float("nan")}, "al nan.*finite"),
        ({"tpot_ms": float("inf")}, "finite"),
        ({"al_interval": [1.0, float("nan")]}, "finite"),
        ({"alpha": [{"value": 1.0, "interval": [0.1, float("-inf")], "trials": 3}]}, "finite"),
        ({"al": None}, "al null.*missing must say why"),
        ({"steps": 1.5}, "steps 1.5.*int"),
        ({"steps": True}, "steps True"),
        ({"arm": None}, "arm None"),
        ({"missing": None}, "missing None"),
        ({"schema": 2}, "schema 2"),
        ({"benchmark": "step"}, "benchmark 'step'"),
    ],
)
def test_a_row_that_says_nothing_true_is_not_made(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        row(**changes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2.*must be one JSON object"),
        ("[]", "line 2: a list"),
        ('{"al": NaN}', "line 2: NaN.*finite"),
        ('{"al": 1e999}', "line 2: no field"),
        ("{}", "line 2: no field"),
        ("", "line 2"),
        ('{"arm": "dense", "armour": 1}', "line 2: field 'armour'"),
    ],
)
def test_a_broken_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(row().line() + line + "\n" + row().line())
    with pytest.raises(ConfigError, match=words):
        read_rows(path)


def test_infinity_by_exponent_is_refused(tmp_path: Path) -> None:
    content = asdict(row()) | {"al": 0.125}
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(content).replace("0.125", "1e999") + "\n")
    with pytest.raises(ConfigError, match="line 1: al inf"):
        read_rows(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no.jsonl"):
        read_rows(tmp_path / "no.jsonl")


# The file.


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "results" / "run.jsonl"
    with RowFile(path) as file:
        file.append(row())
        file.append(row(seed=6))
        assert read_rows(path) == [row(), row(seed=6)]  # on the disk already
    with RowFile(path) as file:
        assert file.rows == [row(), row(seed=6)]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_line_that_was_cut_off_is_dropped(share: float, tmp_path: Path) -> None:
    path, line = tmp_path / "run.jsonl", row().line()
    cut = line[: int(len(line) * share)]
    path.write_text(row(seed=6).line() + cut.rstrip("\n"))
    assert read_rows(path) == [row(seed=6)]
    with RowFile(path) as file:
        assert file.rows == [row(seed=6)]
        file.append(row())
    assert read_rows(path) == [row(seed=6), row()]


def test_a_damaged_line_inside_stops_a_run_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    content = row().line() + "{\n" + row(seed=6).line() + "{"
    path.write_text(content)
    with pytest.raises(ConfigError, match="line 2"):
        RowFile(path)
    assert path.read_text() == content


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    program = "import sys\nfrom pathlib import Path\n" + (
        "from tllm_wmtp.bench.sweep.store import RowFile\nRowFile(Path(sys.argv[1]))\n"
    )
    with RowFile(path) as file:
        file.append(row())
        run = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert "another run writes it now" in run.stderr
        with pytest.raises(ConfigError, match="another run"):
            RowFile(path)
    with RowFile(path) as file:
        assert file.rows == [row()]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="choose another folder"):
        RowFile(tmp_path / "taken" / "run.jsonl")
