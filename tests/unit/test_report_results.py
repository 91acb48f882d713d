"""Reading results: what is refused, what is replaced by a newer one, what is left out and named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import report_results as made

from tllm_wmtp.bench.report.records import record
from tllm_wmtp.bench.report.results import load, parse
from tllm_wmtp.bench.report.schema import Machine, StepRatio
from tllm_wmtp.errors import ConfigError


def folder(path: Path, **files: Any) -> Path:
    return made.write(path / "results", {name.replace("_", "."): f for name, f in files.items()})


def test_every_kind_of_result_is_read(tmp_path: Path) -> None:
    results = load([made.write(tmp_path / "all", made.everything())])
    assert len(results.run) == len(made.suite())
    assert len(results.step) == len(results.probe) == 2
    for kind in ("fit", "plan", "prefill", "depth", "attention", "demo"):
        assert len(getattr(results, kind)) == 1, kind
    assert {source.state for source in results.sources} == {"shown"}
    assert results.machines == [Machine("a processor", 2, "avx2", "cpu")]
    assert results.notes == ()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_refused_with_file_and_line(tmp_path: Path, number: str) -> None:
    text = json.dumps(made.step(), indent=1)
    line = next(i for i, each in enumerate(text.split("\n"), 1) if '"verify_ms":' in each)
    broken = text.split("\n")
    broken[line - 1] = f'   "verify_ms": {number},'
    (tmp_path / "bad.json").write_text("\n".join(broken))
    with pytest.raises(ConfigError, match=rf"bad\.json, line {line}: {number}"):
        load([tmp_path])


def test_a_text_that_says_nan_is_no_number() -> None:
    with pytest.raises(ConfigError, match="line 3: NaN"):
        parse('{"a": "NaN, Infinity and 1e999",\n"b": 1,\n"c": NaN}', "x.json")


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_a_row_with_such_a_number_is_refused_with_file_and_line(
    tmp_path: Path, number: str
) -> None:
    rows = [made.run_row(), made.run_row(depth=5)]
    lines = [json.dumps(row) for row in rows]
    lines[1] = json.dumps({**rows[1], "al": 0.125}).replace("0.125", number, 1)
    (tmp_path / "run-1.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"run-1\.jsonl,? line 2"):
        load([tmp_path])


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    content = made.step()
    del content["rows"][4]["draft_ms"]
    with pytest.raises(ConfigError, match=r"step\.json.*rows.*\[4\].*'draft_ms'.*missing"):
        load([folder(tmp_path, step_json=content)])


@pytest.mark.parametrize(
    ("value", "rule"),
    [("4", "a number"), (None, "a number"), (True, "a number"), ([1.0], "a number")],
)
def test_a_value_of_another_type_is_refused(value: Any, rule: str) -> None:
    ratio = made.step()["ratios"][0] | {"step_native_over_windowed": value}
    with pytest.raises(ConfigError, match=f"'step_native_over_windowed'.*it must be {rule}"):
        record(StepRatio, ratio, "here")


def test_an_interval_has_two_ends() -> None:
    ratio = made.step()["ratios"][0] | {"draft_native_over_windowed_interquartile": [1.0]}
    with pytest.raises(ConfigError, match="1 values: it has 2"):
        record(StepRatio, ratio, "here")


def test_broken_json_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"benchmark": "step",\n"rows": [')
    with pytest.raises(ConfigError, match=r"cut\.json, line 2: it must be JSON"):
        load([tmp_path])


def test_of_one_configuration_the_newer_day_is_shown_whatever_the_files_are_called(
    tmp_path: Path,
) -> None:
    old, new = made.step(date="2026-01-01"), made.step(date="2026-01-03")
    results = load([folder(tmp_path, z_json=old, a_json=new)])
    assert [row.date for row in results.step[0].rows[:1]] == ["2026-01-03"]
    states = {source.path: source.state for source in results.sources}
    assert states["results/a.json"] == "shown"
    assert states["results/z.json"] == "not shown: results/a.json is newer"
    assert "1 result of results/z.json" in results.notes[0]


def test_on_one_day_the_newer_file_is_shown(tmp_path: Path) -> None:
    where = folder(tmp_path, a_json=made.step(n_runs=5), b_json=made.step(n_runs=6))
    os.utime(where / "a.json", (2e9, 2e9))
    os.utime(where / "b.json", (1e9, 1e9))
    assert load([where]).step[0].rows[0].n_runs == 5


def test_of_rows_of_one_cell_the_later_line_is_shown(tmp_path: Path) -> None:
    rows = [made.run_row(n_runs=1), made.run_row(arm="native"), made.run_row(n_runs=2)]
    for row in rows:
        row["config_hash"] = row["arm"]
    results = load([folder(tmp_path, run_jsonl=rows)])
    assert sorted((row.arm, row.n_runs) for row in results.run) == [("native", 4), ("windowed", 2)]
    assert results.sources[0].state == "2 of 3 rows shown: newer ones replace the others"


def test_the_same_configuration_on_another_machine_is_another_result(tmp_path: Path) -> None:
    other = made.step(**made.OTHER_MACHINE)
    results = load([folder(tmp_path, a_json=made.step(), b_json=other)])
    assert len(results.step) == 2
    assert len(results.machines) == 2


def test_a_last_line_that_is_cut_off_is_left_out_and_named(tmp_path: Path) -> None:
    where = folder(tmp_path, run_jsonl=[made.run_row()])
    with (where / "run.jsonl").open("a") as file:
        file.write('{"benchmark": "ru')
    results = load([where])
    assert len(results.run) == 1
    assert "last line is cut off" in results.notes[0]


def test_json_that_is_no_result_is_named_and_not_shown(tmp_path: Path) -> None:
    where = folder(
        tmp_path, step_json=made.step(), other_json={"a": 1}, new_json={"benchmark": "soak"},
        data_jsonl=[{"task": "vt", "text": "x"}],
    )  # fmt: skip
    states = {source.path: source.state for source in load([where]).sources}
    assert states["results/other.json"] == "not shown: no result"
    assert states["results/data.jsonl"] == "not shown: no result"
    assert states["results/new.json"] == "not shown: holds 'soak', which no section shows"


def test_folders_below_are_read_and_hidden_ones_are_not(tmp_path: Path) -> None:
    made.write(tmp_path / "a" / "deep", {"step.json": made.step()})
    made.write(tmp_path / "a" / ".cache", {"plan.json": made.plan()})
    results = load([tmp_path / "a"])
    assert [source.path for source in results.sources] == ["a/deep/step.json"]


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no result of a benchmark.*wmtp bench step"):
        load([tmp_path])


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        load([tmp_path / "nowhere"])
