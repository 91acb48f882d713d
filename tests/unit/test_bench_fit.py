"""``wmtp bench fit``: timers, predictions and what a sweep does, against numbers made by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_model import tiny_checkpoint

from tllm_wmtp.bench.latency_fit import measure, predictions, repetitions
from tllm_wmtp.bench.latency_fit.fits import ArmFit
from tllm_wmtp.bench.latency_fit.measure import FitBench, run_fit_bench
from tllm_wmtp.bench.latency_fit.predictions import predict, predict_left_out
from tllm_wmtp.bench.latency_fit.repetitions import Sweep, Timers, estimate, medians
from tllm_wmtp.bench.latency_fit.run_rows import fit_run_rows
from tllm_wmtp.bench.step import Contestant
from tllm_wmtp.cli import main
from tllm_wmtp.errors import ConfigError

DEPTHS = (2, 3, 4, 5, 6, 7, 8, 9)
NATIVE, WINDOWED = Timers(1.19, 5.1), Timers(0.71, 0.4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (repetitions, predictions):
        monkeypatch.setattr(module, "RESAMPLES", 100)


def made(
    arm: str,
    timers: Timers,
    repeats: int = 20,
    noise: float = 0.0,
    row_ms: float = 0.0,
    jump_ms: float = 0.0,
) -> Sweep:
    """Steps of the model in ms: ``t_verify`` 16, ``row_ms`` per row, a jump from depth 5 on; noise
    is a share of each time, and every seventh time is far out."""
    chance = random.Random(len(arm))
    sweep = Sweep(arm, 65536, DEPTHS)
    for repeat in range(repeats):
        for depth in DEPTHS:
            outlier = 3.0 if noise and (repeat + depth) % 7 == 0 else 1.0
            first, later, verify = (
                time * (1 + chance.gauss(0, noise)) * outlier
                for time in (
                    timers.ctx_ms + timers.fwd_ms,
                    (depth - 2) * timers.fwd_ms,
                    16 + row_ms * (depth - 1) + (jump_ms if depth >= 5 else 0.0),
                )
            )
            sweep.add(depth, (first + later) / 1e3, verify / 1e3, first / 1e3)
    return sweep


# Timers and lines


def test_timers_take_the_first_forward_apart_from_the_later_ones() -> None:
    sweep = Sweep("native", 1024, (2, 4))
    sweep.add(2, 0.007, 0.010, 0.007)
    sweep.add(4, 0.013, 0.011, 0.009)  # two later forwards of 2 ms
    sweep.add(2, 0.005, 0.010, 0.005)
    sweep.add(4, 0.013, 0.012, 0.005)  # of 4 ms
    assert sweep.forwards_ms(2) == []
    assert sweep.forwards_ms(4) == pytest.approx([2.0, 4.0])
    assert sweep.step_ms[4] == pytest.approx([24.0, 25.0])
    # First forwards: 8 and 5 ms over the depths, 6.5 in the median; later ones 3.
    whole = sweep.timers(sweep.rounds)
    assert (whole.fwd_ms, whole.ctx_ms) == pytest.approx((3.0, 3.5))
    alone = sweep.timers([1])
    assert (alone.fwd_ms, alone.ctx_ms) == pytest.approx((4.0, 1.0))
    assert whole.draft_ms(5) == pytest.approx(3.5 + 15.0)


def test_medians_are_in_the_order_of_the_depths_whichever_came_first() -> None:
    assert medians({7: [1.0, 2.0, 9.0], 3: [4.0, 4.0, 5.0]}, range(3)) == [4.0, 2.0]


def test_without_a_second_forward_there_is_nothing_to_time() -> None:
    sweep = Sweep("native", 1024, (2,))
    sweep.add(2, 0.007, 0.010, 0.007)
    with pytest.raises(ValueError, match="second draft forward"):
        sweep.timers([0])


def test_lines_through_a_model_give_the_model_back() -> None:
    fit = ArmFit(made("native", NATIVE)).json()
    assert fit["gammas"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert fit["slope_ms"] == pytest.approx(1.19)
    assert fit["intercept_ms"] == pytest.approx(16 + 5.1)
    assert fit["break"] is None
    assert fit["r_squared"] == pytest.approx(1.0)
    assert fit["timers"]["t_fwd_ms"] == pytest.approx(1.19)
    assert fit["timers"]["t_ctx_ms"] == pytest.approx(5.1)
    for entry in fit["agreement"]:
        assert entry["difference_ms"] == pytest.approx(0.0, abs=1e-9)


def test_rows_that_cost_and_a_jump_of_the_verify_are_told_from_the_draft() -> None:
    fit = ArmFit(made("windowed", WINDOWED, row_ms=0.5, jump_ms=0.54)).json()
    assert fit["break"]["gamma"] == fit["verify"]["break"]["gamma"] == 4
    assert fit["break"]["jump_ms"] == pytest.approx(0.54)
    assert fit["slope_ms"] == pytest.approx(0.71 + 0.5)
    assert fit["draft"]["slope_ms"] == pytest.approx(0.71)
    assert fit["draft"]["intercept_ms"] == pytest.approx(0.4)
    assert fit["verify"]["slope_ms"] == pytest.approx(0.5)
    step_slope = fit["agreement"][2]
    assert step_slope["timers_ms"] == pytest.approx(0.71 + 0.5)
    assert step_slope["difference_ms"] == pytest.approx(0.0, abs=1e-9)


def test_noise_with_outliers_leaves_lines_and_timers_in_agreement() -> None:
    fit = ArmFit(made("native", NATIVE, repeats=60, noise=0.02)).json()
    assert fit["slope_ms"] == pytest.approx(1.19, rel=0.2)
    assert fit["timers"]["t_fwd_ms"] == pytest.approx(1.19, rel=0.02)
    low, high = fit["timers"]["t_fwd_ms_interval"]
    assert 1.17 < low < 1.20  # outliers on one side move a median a little
    assert 1.19 < high < 1.21
    assert all(entry["agrees"] for entry in fit["agreement"])


def test_a_timer_that_sees_another_time_does_not_agree() -> None:
    sweep = made("native", NATIVE, repeats=20, noise=0.005)
    for depth in DEPTHS:  # half of what the first forward costs is taken for later ones' time
        sweep.extend_ms[depth] = [time / 2 for time in sweep.extend_ms[depth]]
    agrees = [entry["agrees"] for entry in ArmFit(sweep).json()["agreement"]]
    assert not any(agrees[:2])


def test_an_estimate_resamples_repetitions() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    found = estimate(range(5), lambda rounds: sum(values[r] for r in rounds) / 5)
    assert found.value == 22.0
    assert 1.0 < found.low < 4.0
    assert 60.0 < found.high <= 100.0


# Predictions


def test_a_windowed_step_is_the_native_one_less_delta() -> None:
    # Delta: 4.7 of t_ctx and 0.48 per forward.
    found = predict(made("native", NATIVE), made("windowed", WINDOWED))
    assert [entry["depth"] for entry in found] == list(DEPTHS)
    for entry in found:
        gamma = entry["depth"] - 1
        assert entry["delta_ms"] == pytest.approx(4.7 + 0.48 * gamma)
        assert entry["native_step_ms"] == pytest.approx(16 + 5.1 + 1.19 * gamma)
        assert entry["predicted_windowed_step_ms"] == pytest.approx(16 + 0.4 + 0.71 * gamma)
        assert entry["relative_error"] == pytest.approx(0.0, abs=1e-9)
        assert entry["verify_native_minus_windowed_ms"] == pytest.approx(0.0, abs=1e-9)


def test_what_predicts_is_not_what_is_predicted() -> None:
    native, windowed = made("native", NATIVE), made("windowed", WINDOWED)
    before = predict(native, windowed)[5]
    for sweep in (native, windowed):  # odd repetitions: the steps
        for times in sweep.step_ms.values():
            times[1::2] = [time + 10 for time in times[1::2]]
    changed = predict(native, windowed)[5]
    assert changed["delta_ms"] == before["delta_ms"]
    assert changed["native_step_ms"] == pytest.approx(before["native_step_ms"] + 10)
    native, windowed = made("native", NATIVE), made("windowed", WINDOWED)
    for sweep in (native, windowed):  # the even ones' steps and the odd ones' timers: not used
        for times in sweep.step_ms.values():
            times[0::2] = [0.0] * len(times[0::2])
        for times in sweep.extend_ms.values():
            times[1::2] = [0.0] * len(times[1::2])
    assert predict(native, windowed)[5] == before


@pytest.mark.parametrize("half", [0, 1])
def test_both_halves_leave_their_doubt_in_the_errors_interval(half: int) -> None:
    sweeps = made("native", NATIVE), made("windowed", WINDOWED)
    chance = random.Random(5)
    for repeat in range(half, 20, 2):  # one half is noisy, the other repeats exactly
        for sweep in sweeps:
            for depth in DEPTHS:
                noise = chance.gauss(0, 0.3)
                for times in (sweep.step_ms, sweep.draft_ms, sweep.extend_ms):
                    times[depth][repeat] += noise
    for entry in predict(*sweeps):
        low, high = entry["relative_error_interval"]
        assert high - low > 1e-3
        low, high = entry["delta_ms_interval"]
        assert (high - low > 1e-2) == (half == 0)


def test_a_verify_that_differs_between_the_arms_is_an_error_of_the_prediction() -> None:
    native, windowed = made("native", NATIVE), made("windowed", WINDOWED)
    for depth in DEPTHS:
        native.verify_ms[depth] = [time + 2 for time in native.verify_ms[depth]]
        native.step_ms[depth] = [time + 2 for time in native.step_ms[depth]]
    for entry in predict(native, windowed):
        assert entry["relative_error"] == pytest.approx(2 / entry["windowed_step_ms"])
        assert entry["verify_native_minus_windowed_ms"] == pytest.approx(2.0)


def test_predictions_without_timers_leave_out_what_they_predict() -> None:
    jump = {depth: 0.54 if depth >= 5 else 0.0 for depth in DEPTHS}
    native = {d: 20 + 1.19 * (d - 1) + jump[d] for d in DEPTHS}
    windowed = {d: 16 + 0.71 * (d - 1) + jump[d] for d in DEPTHS}
    for entry in predict_left_out(65536, native, windowed):
        assert entry["relative_error"] == pytest.approx(0.0, abs=1e-9)
    off = {**windowed, 7: windowed[7] + 3}
    (wrong,) = (e for e in predict_left_out(65536, native, off) if e["depth"] == 7)
    assert wrong["delta_ms"] == pytest.approx(4 + 0.48 * 6)
    assert wrong["windowed_step_ms"] - wrong["predicted_windowed_step_ms"] == pytest.approx(3)
    assert predict_left_out(65536, {d: native[d] for d in (2, 3, 4)}, windowed) == []


def test_a_left_out_depth_has_the_interval_of_one_more_point() -> None:
    # Depth 5 from differences 0, 3, 0 at draft lengths 1, 2, 3: a flat line of 1, 6 ms^2 left for
    # one degree of freedom (t 12.7062), and a spread of 2 with the new point 2 from the middle.
    native, windowed = {2: 20.0, 3: 23.0, 4: 20.0, 5: 20.0}, dict.fromkeys((2, 3, 4, 5), 20.0)
    entry = predict_left_out(1024, native, windowed)[-1]
    half = 12.7062047 * (6 * (1 + 1 / 3 + 2**2 / 2)) ** 0.5
    assert entry["delta_ms"] == pytest.approx(1.0)
    assert entry["delta_ms_interval"] == pytest.approx([1 - half, 1 + half])
    assert entry["relative_error_interval"] == pytest.approx([(-1 - half) / 20, (half - 1) / 20])


# The sweep


def test_every_depth_and_arm_takes_a_turn_and_nobody_always_goes_first(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int | None, int]] = []
    step = Contestant.step

    def recorded(self: Contestant, depth: int | None = None) -> None:
        step(self, depth)
        order.append((self.arm, depth, self.request.metrics.drafted[-1]))

    monkeypatch.setattr(Contestant, "step", recorded)
    bench = FitBench(checkpoint, (300,), (2, 3, 5), window=50, n_sink=4, repeats=10)
    result = run_fit_bench(bench)
    assert all(depth == drafted + 1 for _, depth, drafted in order)
    rounds = [order[i : i + 6] for i in range(0, len(order), 6)]
    assert len(rounds) == 10 + measure.WARM_UP
    everyone = {(arm, depth) for arm in ("native", "windowed") for depth in (2, 3, 5)}
    assert all({turn[:2] for turn in each} == everyone for each in rounds)
    assert {each[0][:2] for each in rounds} == everyone
    assert all(row["n_runs"] == 10 for row in result["rows"])
    # Too few depths for a jump: it was not looked for.
    assert all(fit["break_p_value"] is None for fit in result["fits"])


@pytest.mark.parametrize("depths", [(2, 3, 5), (2, 3, 4, 5)])
def test_at_every_depth_each_arm_goes_first_as_often_in_both_halves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, depths: tuple[int, ...]
) -> None:
    order: list[tuple[str, int | None]] = []
    step = Contestant.step

    def recorded(self: Contestant, depth: int | None = None) -> None:
        step(self, depth)
        order.append((self.arm, depth))

    monkeypatch.setattr(Contestant, "step", recorded)
    run_fit_bench(FitBench(checkpoint, (100,), depths, window=50, n_sink=4, repeats=8))
    size = 2 * len(depths)
    rounds = [order[i : i + size] for i in range(size * measure.WARM_UP, len(order), size)]
    for half in (rounds[0::2], rounds[1::2]):
        for depth in depths:
            first = [next(arm for arm, d in each if d == depth) for each in half]
            assert first.count("native") == first.count("windowed") == 2


CELL = {"arm", "context", "depth", "gamma", "n_runs"}
TIMES = ("step_ms", "draft_ms", "verify_ms", "ctx_ms", "fwd_ms")


def keys_of(value: Any) -> set[str]:
    """Of all objects within."""
    if isinstance(value, dict):
        return set(value).union(*(keys_of(each) for each in value.values()))
    return set().union(*(keys_of(each) for each in value)) if isinstance(value, list) else set()


def test_the_command_prints_one_object_with_every_field(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--contexts", "300,400", "--depths", "2..7", "--window", "64", "--sink", "4"]
    command = ["bench", "fit", "--model", str(checkpoint), *options, "--repeats", "4"]
    assert main([*command, "--json", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    (file,) = tmp_path.iterdir()
    assert file.name == f"fit-{result['config_hash']}.json"
    assert json.loads(file.read_text()) == result
    assert result["benchmark"] == "fit"
    assert {"date", "device", "processor", "threads", "isa", "model", "depths"} <= set(result)
    for row in result["rows"]:
        assert set(row) >= CELL.union(TIMES, (f"{name}_interval" for name in TIMES))
        nulls = {name for name in TIMES if row[name] is None}
        assert nulls == ({"fwd_ms"} if row["depth"] == 2 else set())
        assert set(row.get("missing", ())) == nulls
    cells = [(row["context"], row["arm"], row["depth"]) for row in result["rows"]]
    assert len(set(cells)) == len(cells) == 2 * 2 * 6
    assert [(fit["context"], fit["arm"]) for fit in result["fits"]] == [
        (300, "native"), (300, "windowed"), (400, "native"), (400, "windowed"),
    ]  # fmt: skip
    assert len(result["predictions"]) == 2 * 6
    # Random keys and values say nothing about acceptance.
    assert not keys_of(result) & {"al", "alpha", "tpot_ms", "accepted", "accepted_histogram"}
    assert main([*command, "--contexts", "300", "--depths", "2..4"]) == 0
    shown = capsys.readouterr().out
    assert "windowed step = native step - Delta" in shown
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--depths", "2,3"], "depths 2,3"),
        (["--depths", "1..5"], "depth 1"),
        (["--depths", "5..2"], "'5..2'"),
        (["--depths", "two"], "'two'"),
        (["--depths", "2..999999999999"], "256 depths or fewer"),
        (["--repeats", "3"], "repeats 3"),
        (["--window", "0"], "window 0"),
        (["--contexts", "1m"], "max_seq_len"),
        (["--where", "batch=1"], "--where batch=1"),
        (["--out", __file__], "it must be a folder that can be written"),
        (["--where", "batch"], "'batch'"),
        (["--rows", "x", "--where", "batch=1", "--where", "batch=2"], "--where batch=2"),
        (["--rows", "/nowhere/rows.jsonl"], "/nowhere/rows.jsonl"),
    ],
)
def test_the_command_refuses(
    checkpoint: Path,
    options: list[str],
    value: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(measure, "load_model", load)
    try:
        code = main(["bench", "fit", "--model", str(checkpoint), *options])
    except SystemExit as ended:  # argparse
        code = ended.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert value in shown.err
    assert len(shown.err.strip().splitlines()) == 1


# Rows of wmtp bench run


def run_row(arm: str, depth: int, t_iter_ms: float | None, **changes: Any) -> dict[str, Any]:
    phases = dict.fromkeys(("step_ms", "draft_ms", "verify_ms", "ctx_ms", "fwd_ms"))
    unseen = (
        "t_iter_ms_interval", "tpot_ms", "tpot_ms_interval", "tokens_per_s", "ttft_s",
        "draft_kv_bytes", "bytes_moved", "floor_ms", "fraction_of_floor",
        "read_bandwidth_gb_per_s", "score", "output_digest", "al", "al_interval", "alpha",
        "accepted_histogram",
    )  # fmt: skip
    row: dict[str, Any] = {
        "benchmark": "run", "schema": 1, "config_hash": "0" * 12, "config": {}, "arm": arm,
        "model": "m", "target": "openai", "input": "vt", "difficulty": "easy", "context": 65000,
        "depth": depth, "window": 4032 if arm == "windowed" else None, "n_sink": 64,
        "dtype": "float32", "kv_dtype": "float32", "batch": 1, "max_tokens": 64,
        "temperature": 0.0, "seed": 1, "date": "2026-11-30", "device": "cpu", "processor": "p",
        "threads": 2, "isa": "avx2", "n_runs": 3, "prompt_tokens": 65000, "output_tokens": 192,
        "steps": 60, "steps_kept": 60, "steps_clipped": 0, "steps_ramp": 0, "screened": 0,
        "b_eff": 1, "t_iter_ms": t_iter_ms, **phases, **dict.fromkeys(unseen),
    }  # fmt: skip
    row |= changes
    row["missing"] = {name: "not seen" for name, value in row.items() if value is None}
    return row


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def both_arms(**changes: Any) -> list[dict[str, Any]]:
    """T_iter of the model with the verify's jump of 0.54 ms at depth 5."""
    return [
        run_row(arm, depth, fixed + fwd * (depth - 1) + (0.54 if depth >= 5 else 0), **changes)
        for arm, fixed, fwd in (("native", 21.1, 1.19), ("windowed", 16.4, 0.71))
        for depth in DEPTHS
    ]


def test_rows_of_a_run_are_fitted_without_measuring(tmp_path: Path) -> None:
    rows = [*both_arms(), run_row("dense", 1, 15.0), run_row("native", 2, None)]
    result = fit_run_rows([write(tmp_path / "run-a.jsonl", rows)], {})
    native, windowed = result["fits"]
    assert (native["slope_ms"], windowed["slope_ms"]) == pytest.approx((1.19, 0.71))
    assert (native["intercept_ms"], windowed["intercept_ms"]) == pytest.approx((21.1, 16.4))
    assert native["break"]["gamma"] == windowed["break"]["gamma"] == 4
    assert (result["window"], result["n_sink"], result["model"]) == (4032, 64, "m")
    assert len(result["predictions"]) == len(DEPTHS)
    assert all(abs(entry["relative_error"]) < 1e-9 for entry in result["predictions"])
    assert result["rows"][0]["missing"]["draft_ms"] == "not seen"


def test_prompts_of_one_context_are_one_and_inputs_are_medians(tmp_path: Path) -> None:
    rows = [
        *both_arms(),
        *both_arms(context=65500, input="cwe"),
        *both_arms(context=65600, input="fwe"),
        *both_arms(context=16000),
    ]
    for row in rows[16:32]:
        row["t_iter_ms"] += 50  # one input of three is disturbed
    result = fit_run_rows([write(tmp_path / "run-a.jsonl", rows)], {})
    assert result["contexts"] == [16000, 65500]
    assert [fit["intercept_ms"] for fit in result["fits"]] == pytest.approx([21.1, 16.4] * 2)
    assert {row["n_rows"] for row in result["rows"]} == {1, 3}


def test_contexts_two_percent_apart_are_one_and_no_further(tmp_path: Path) -> None:
    near, far = both_arms(context=66_300), both_arms(context=66_301)
    rows = both_arms(context=65_000)
    assert fit_run_rows([write(tmp_path / "a.jsonl", rows + near)], {})["contexts"] == [65_000]
    assert fit_run_rows([write(tmp_path / "b.jsonl", rows + far)], {})["contexts"] == [
        65_000,
        66_301,
    ]


def test_an_iteration_of_a_batch_is_that_of_all_its_requests(tmp_path: Path) -> None:
    rows = both_arms(batch=4, b_eff=4)
    result = fit_run_rows([write(tmp_path / "run-a.jsonl", rows)], {})
    assert result["fits"][0]["slope_ms"] == pytest.approx(4 * 1.19)


def test_a_line_goes_through_one_setup(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "run-a.jsonl", both_arms()),
        write(tmp_path / "run-b.jsonl", both_arms(kv_dtype="bfloat16")),
    ]
    with pytest.raises(ConfigError, match="--where kv_dtype=bfloat16"):
        fit_run_rows(files, {})
    chosen = fit_run_rows(files, {"kv_dtype": "float32"})
    assert chosen == fit_run_rows(files[:1], {})
    with pytest.raises(ConfigError, match="no such field"):
        fit_run_rows(files, {"colour": "red"})
    with pytest.raises(ConfigError, match="0 of them chosen"):
        fit_run_rows(files, {"kv_dtype": "fp8"})


def test_a_window_is_chosen_among_the_rows_that_have_one(tmp_path: Path) -> None:
    """Of a dose-response too: its other windows have one depth, the one to choose has all."""
    others = [run_row("windowed", 7, 20.0, window=window) for window in (1024, 256)]
    file = write(tmp_path / "run-a.jsonl", [*both_arms(), *others])
    with pytest.raises(ConfigError, match="for example --where window=4032"):
        fit_run_rows([file], {})
    for where in ({"window": "4032"}, {"window": "4032", "n_sink": "64"}):
        assert {fit["arm"] for fit in fit_run_rows([file], where)["fits"]} == {"native", "windowed"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"t_iter_ms": 0.0}, "t_iter_ms 0.0 of row 0{12}: an iteration takes more than 0 ms"),
        ({"t_iter_ms": -1.0}, "t_iter_ms -1.0"),
        ({"t_iter_ms": 1e300}, "t_iter_ms 1e.300"),
        ({"t_iter_ms": 10**400}, "t_iter_ms 10000"),
        ({"b_eff": 0}, "b_eff 0 of row"),
        ({"b_eff": None}, "b_eff None of row"),
        ({"depth": 1}, "depth 1 of row 0{12}: a row of the windowed arm with t_iter_ms has 2 to"),
        ({"depth": 10**400}, "depth 10000"),
        ({"context": 0}, "context 0 of row"),
        ({"context": 10**400}, "context 10000"),
    ],
)
def test_numbers_that_no_run_gives_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    rows = both_arms()
    rows[-1] |= changes
    rows[-1]["missing"] = {name: "not seen" for name, value in rows[-1].items() if value is None}
    with pytest.raises(ConfigError, match=message):
        fit_run_rows([write(tmp_path / "run-a.jsonl", rows)], {})


def test_an_arm_of_two_depths_has_no_line(tmp_path: Path) -> None:
    few = [row for row in both_arms() if row["arm"] == "windowed" or row["depth"] < 4]
    result = fit_run_rows([write(tmp_path / "run-a.jsonl", few)], {})
    assert [fit["arm"] for fit in result["fits"]] == ["windowed"]
    assert "native at 65,000 tokens: 2 depths" in result["left_out"][0]
    assert "predictions" in result["missing"]
    fewer = [row for row in both_arms() if row["depth"] < 4]
    with pytest.raises(ConfigError, match="three depths or more"):
        fit_run_rows([write(tmp_path / "run-b.jsonl", fewer)], {})


def test_the_command_fits_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "run-a.jsonl", both_arms())
    assert main(["bench", "fit", "--rows", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["benchmark"] == "fit"
    assert main(["bench", "fit", "--rows", str(file), "--where", "arm=native"]) == 0
    assert "0.54 at 4" in capsys.readouterr().out
