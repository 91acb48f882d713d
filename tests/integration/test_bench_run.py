"""``wmtp bench run``, from a suite to its rows, on the embedded runtime and a real server."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import engine, outputs, run
from tiny_model import tiny_checkpoint

from tllm_wmtp import LLM, MtpConfig, SamplingParams, machine
from tllm_wmtp.bench import inputs
from tllm_wmtp.bench.sweep import embedded, runner
from tllm_wmtp.bench.sweep.cells import Cell
from tllm_wmtp.bench.sweep.protocol import Answer
from tllm_wmtp.bench.sweep.results import output_digest
from tllm_wmtp.bench.sweep.rows import Row, read_rows
from tllm_wmtp.bench.sweep.suite import Names, Suite, load_suite
from tllm_wmtp.cli import arguments, main
from tllm_wmtp.demo.tokenizer import build_tokenizer
from tllm_wmtp.errors import ConfigError

Run = Callable[..., tuple[int, str, str]]
CONTEXT, TOKENS = 200, 12
SUITE = """\
models: [MODEL]
inputs: [logs]
contexts: [200]
depths: [4]
windows: [24]
sinks: [4]
repeats: 2
max_tokens: 12
ignore_eos: true
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3, vocab_size=640)
    build_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(autouse=True)
def _bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a gigabyte would be read for each suite."""
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 5e9)


@pytest.fixture
def suite_file(tmp_path: Path, checkpoint: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "suite.yaml"
        file.write_text(text.replace("MODEL", str(checkpoint)))
        return file

    return write


@pytest.fixture
def wmtp(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def load(file: Path) -> Suite:
    return load_suite(file, Names(arguments.count, arguments.context, Path))


class Quiet:
    """Watches, and may stop a run by what it does with a row."""

    def __init__(self, on_row: Callable[[Cell, Row], None] = lambda cell, row: None):
        self.on_row = on_row
        self.advanced, self.failures = 0.0, list[tuple[Cell, Exception]]()

    def begin(self, cells: Sequence[Cell], skipped: int) -> None:
        self.expected = sum(cell.cost for cell in cells)

    def advance(self, cost: float) -> None:
        self.advanced += cost

    def done(self, cell: Cell, row: Row) -> None:
        self.on_row(cell, row)

    def failed(self, cell: Cell, error: Exception) -> None:
        self.failures.append((cell, error))


def test_rows_are_those_of_the_engine_run_by_hand(
    wmtp: Run, suite_file: Callable[[str], Path], checkpoint: Path, tmp_path: Path
) -> None:
    file = suite_file(SUITE + "kv_dtypes: [float32, bfloat16]\n")
    code, out, err = wmtp("bench", "run", file, "--out", tmp_path / "out", "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["cells"], summary["done"], summary["skipped"], summary["failed"]) == (
        6,
        6,
        0,
        0,
    )
    assert summary["differing"] == []
    rows = {(row.arm, row.kv_dtype): row for row in read_rows(Path(summary["file"]))}
    assert len(rows) == 6

    prompts = [p.ids for p in inputs.prompts("logs", build_tokenizer(), CONTEXT, 2, 0)]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for arm, speculation in (("dense", None), ("windowed", MtpConfig(4, 24, 4))):
        requests = run(engine(checkpoint, speculation), prompts, params)
        row = rows[arm, "float32"]
        metrics = [request.metrics for request in requests]
        expected = [
            sum(column) for column in zip(*(m.accepted_histogram for m in metrics), strict=True)
        ]
        assert row.accepted_histogram == expected
        made = [Answer(0, 0, 0, 0, token_ids=tuple(ids)) for ids in outputs(requests)]
        assert row.output_digest == output_digest(made)
        assert (row.n_runs, row.prompt_tokens, row.output_tokens) == (2, 2 * CONTEXT, 2 * TOKENS)
        assert row.steps == sum(expected)
        assert row.draft_kv_bytes == max(m.draft_kv_bytes for m in metrics)
    dense = rows["dense", "float32"]
    assert (dense.depth, dense.window, dense.n_sink, dense.alpha) == (1, None, 0, [])
    assert "no draft" in dense.missing["ctx_ms"]
    windowed, native = rows["windowed", "float32"], rows["native", "float32"]
    for row in rows.values():
        assert row.tpot_ms == pytest.approx(row.t_iter_ms * row.b_eff / row.al)  # type: ignore[operator]
        assert row.steps == row.steps_kept + row.steps_clipped + row.steps_ramp
    for row in (windowed, native):
        assert row.draft_ms == pytest.approx(row.ctx_ms + 2 * row.fwd_ms, rel=0.5)  # type: ignore[operator]
        assert row.step_ms == pytest.approx(row.draft_ms + row.verify_ms, rel=0.5)  # type: ignore[operator]
    assert windowed.bytes_moved < native.bytes_moved  # type: ignore[operator]
    assert rows["windowed", "bfloat16"].bytes_moved < windowed.bytes_moved  # type: ignore[operator]


def test_a_batch_answers_as_its_requests_do_alone(
    suite_file: Callable[[str], Path], tmp_path: Path
) -> None:
    text = SUITE.replace("repeats: 2\n", "") + "prefill_chunk: 256\narms: [dense, windowed]\n"
    watch = Quiet()
    alone = runner.run_suite(load(suite_file(text + "repeats: 3\n")), tmp_path, watch)
    together = runner.run_suite(load(suite_file(text + "batches: [3]\n")), tmp_path, watch)
    assert alone.file != together.file
    for one, three in zip(alone.rows, together.rows, strict=True):
        assert one.output_digest == three.output_digest
        assert one.accepted_histogram == three.accepted_histogram
        assert (one.n_runs, one.b_eff, three.n_runs) == (3, 1, 3)
        assert three.steps < one.steps
        # Two more requests: their keys and values in the verify, and what each of 3 drafts sees.
        rows_read = CONTEXT if one.arm == "dense" else CONTEXT + 3 * (4 + 24)
        assert three.bytes_moved - one.bytes_moved == 2 * 512 * rows_read  # type: ignore[operator]
    assert max(row.b_eff or 0 for row in together.rows) == 3


def test_sampling_reaches_the_requests(suite_file: Callable[[str], Path], tmp_path: Path) -> None:
    text, warm = SUITE + "arms: [dense]\n", "temperature: 1\n"
    rows = [
        runner.run_suite(load(suite_file(text + more)), tmp_path, Quiet()).rows[0]
        for more in ("", warm, warm + "seeds: [1]\n", "repetition_penalty: 1.15\n")
    ]
    assert len({row.output_digest for row in rows}) == 4
    again = runner.run_suite(load(suite_file(text + warm)), tmp_path / "2", Quiet())
    assert again.rows[0].output_digest == rows[1].output_digest


def test_an_interrupted_run_is_taken_up_where_it_ended(
    wmtp: Run, suite_file: Callable[[str], Path], tmp_path: Path
) -> None:
    suite = load(suite_file(SUITE))

    def interrupt(cell: Cell, row: Row) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_suite(suite, tmp_path, Quiet(interrupt))
    file = runner.suite_file(suite, tmp_path)
    (first,) = read_rows(file)
    with file.open("a") as unfinished:
        unfinished.write(first.line()[:70])  # of a run that was killed while it wrote
    code, out, err = wmtp("bench", "run", tmp_path / "suite.yaml", "--out", tmp_path)
    assert code == 0, err
    assert "2 of 3 cells run, 1 were there, 0 failed" in out
    rows = read_rows(file)
    assert rows[0] == first
    assert {row.config_hash for row in rows} == {cell.digest for cell in suite.cells}
    assert len(rows) == 3
    done = runner.run_suite(suite, tmp_path, Quiet())
    assert (done.done, done.skipped, read_rows(file)) == (0, 3, rows)
    other = runner.run_suite(load(suite_file(SUITE + "arms: [dense]\n")), tmp_path, Quiet())
    assert other.file != file
    assert read_rows(file) == rows


def test_a_cell_that_fails_takes_no_other_with_it(
    wmtp: Run, suite_file: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = embedded.Engine

    def build(loaded: Any, config: Any) -> Any:
        if config.speculation is not None and config.speculation.window is None:
            raise ConfigError("the native arm", "it fails here", "nothing helps")
        return real(loaded, config)

    monkeypatch.setattr(embedded, "Engine", build)
    file = suite_file(SUITE + "seeds: [0, 1]\n")
    code, out, err = wmtp("bench", "run", file, "--out", tmp_path / "a", "--json")
    assert code == 1
    summary = json.loads(out)
    assert (summary["done"], summary["failed"]) == (4, 2)
    assert "it fails here" in summary["errors"][0]["error"]
    assert err.count("it fails here") == 2
    code, out, _ = wmtp("bench", "run", file, "--out", tmp_path / "b", "--stop-on-error", "--json")
    assert code == 1
    assert json.loads(out)["failed"] == 1
    monkeypatch.undo()
    code, out, _ = wmtp("bench", "run", file, "--out", tmp_path / "a", "--json")
    assert (code, json.loads(out)["done"], json.loads(out)["skipped"]) == (0, 2, 4)


def test_a_step_that_fails_ends_its_cell_alone(
    suite_file: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = embedded.Contestant._step

    def failing(self: embedded.Contestant) -> None:
        if self.cell.arm == "windowed" and self.tokens > 4:
            raise RuntimeError("no more")
        step(self)

    monkeypatch.setattr(embedded.Contestant, "_step", failing)
    watch = Quiet()
    outcome = runner.run_suite(load(suite_file(SUITE)), tmp_path, watch)
    assert {row.arm for row in outcome.rows} == {"dense", "native"}
    ((cell, error),) = watch.failures
    assert (cell.arm, str(error)) == ("windowed", "no more")
    assert not outcome.holds


def test_outputs_that_differ_are_reported(
    wmtp: Run, suite_file: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = embedded.Contestant._answer

    def tampered(self: embedded.Contestant, request: Any) -> Answer:
        answer = real(self, request)
        if self.cell.arm == "windowed":
            return replace(answer, token_ids=(*(answer.token_ids or ())[:-1], 0))
        return answer

    monkeypatch.setattr(embedded.Contestant, "_answer", tampered)
    code, out, _ = wmtp("bench", "run", suite_file(SUITE), "--out", tmp_path / "out")
    assert code == 1
    assert "DIFFER among dense, native d4, windowed d4 W24" in " ".join(out.split())
    monkeypatch.undo()
    # The rows are there, so what does not hold is said again.
    code, out, _ = wmtp(
        "bench", "run", tmp_path / "suite.yaml", "--out", tmp_path / "out", "--json"
    )
    assert code == 1
    assert len(json.loads(out)["differing"][0]) == 3


def test_arms_take_turns_and_nobody_is_always_first(
    suite_file: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    begin = embedded.Contestant.begin

    def recorded(self: embedded.Contestant, *args: Any) -> None:
        order.append(self.cell.arm)
        begin(self, *args)

    monkeypatch.setattr(embedded.Contestant, "begin", recorded)
    watch = Quiet()
    text = SUITE.replace("repeats: 2", "repeats: 3").replace("max_tokens: 12", "max_tokens: 3")
    runner.run_suite(load(suite_file(text)), tmp_path, watch)
    waves = [order[i : i + 3] for i in range(0, 9, 3)]
    assert {wave[0] for wave in waves} == {"dense", "native", "windowed"}
    assert watch.advanced == pytest.approx(watch.expected)


def test_engines_run_side_by_side_as_memory_allows(suite_file: Callable[[str], Path]) -> None:
    cells = load(suite_file(SUITE + "kv_dtypes: [float32, bfloat16]\n")).cells
    config = embedded.read_config(cells[0].model)
    sizes = {(c.arm, c.kv_dtype): embedded.engine_bytes(c, config) for c in cells}
    # Keys and values of 2 heads, 32 wide: 512 bytes per token in float32, one layer. 213 rows are
    # 4 pages of 64, and one more; the ring has 4 sinks, a window of 24 and 4 spare slots.
    assert sizes["dense", "float32"] == 512 * 5 * 64
    assert sizes["windowed", "float32"] == 512 * (5 * 64 + 4 + 24 + 4)
    assert sizes["native", "bfloat16"] * 2 == sizes["native", "float32"]
    together = embedded.heats(cells, config, 1 << 30)
    assert [[c.kv_dtype for c in heat] for heat in together] == [["bfloat16"] * 3, ["float32"] * 3]
    assert [len(heat) for heat in embedded.heats(cells, config, 1)] == [1] * 6


# Before anything is loaded.


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("depths: [1]\n", "depth"),
        ("contexts: [5000]\n", "the model has 4096 positions"),
        ("windows: [5000]\narms: [windowed]\n", "cannot see more than the model's 4096"),
        ("device: cuda\n", "there is no such device"),
        ("target: {kind: openai, url: 'http://127.0.0.1:9', model: m}\n", "the server must answer"),
        ("target: {kind: triton, url: '127.0.0.1:9', model: m}\n", "the server must answer"),
        (
            "target: {kind: openai, url: 'http://127.0.0.1:9', model: m, api_key_env: NO_SUCH}\n",
            "NO_SUCH",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(
    more: str,
    words: str,
    wmtp: Run,
    suite_file: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    if "cuda" in more and torch.cuda.is_available():
        pytest.skip("this machine has the device")

    def loaded(*args: object, **options: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(embedded, "load_model", loaded)
    key = more.split(":", 1)[0]
    kept = "".join(line for line in SUITE.splitlines(True) if not line.startswith(key))
    code, out, err = wmtp("bench", "run", suite_file(kept + more), "--out", tmp_path / "out")
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
    assert not out


def test_a_model_without_a_tokenizer_is_refused(wmtp: Run, tmp_path: Path) -> None:
    bare = tiny_checkpoint(tmp_path / "bare")
    (tmp_path / "suite.yaml").write_text(SUITE.replace("MODEL", str(bare)))
    code, _, err = wmtp("bench", "run", tmp_path / "suite.yaml", "--out", tmp_path / "out")
    assert code == 2
    assert "tokenizer.json" in err


def test_the_cells_can_be_listed_without_running_them(
    wmtp: Run, suite_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = suite_file(SUITE + "depths: [3, 5]\n".replace("depths", "seeds"))
    code, out, _ = wmtp("bench", "run", file, "--dry-run")
    assert code == 0
    lines = out.splitlines()
    assert lines[-1] == "6 cells"
    assert len(lines) == 8
    assert lines[1].split()[2:5] == ["logs", "200", "dense"]
    code, out, _ = wmtp("bench", "run", file, "--dry-run", "--json")
    listed = json.loads(out)
    assert listed["cells"] == len(listed["list"]) == 6
    assert listed["list"][0]["config_hash"] == lines[1].split()[0]
    code, _, err = wmtp("bench", "run", file)
    assert code == 2
    assert "--out" in err


@pytest.mark.parametrize(
    ("package", "more"),
    [
        ("yaml", ""),
        ("httpx", "target: {kind: openai, url: 'http://127.0.0.1:9', model: m}\n"),
        ("tritonclient", "target: {kind: triton, url: '127.0.0.1:9', model: m}\n"),
    ],
)
def test_a_package_that_is_not_there_is_named(
    package: str,
    more: str,
    wmtp: Run,
    suite_file: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = wmtp("bench", "run", suite_file(SUITE + more), "--out", tmp_path / "out")
    assert code == 2
    assert package in err
    assert "pip install 'tllm-wmtp[bench]'" in err


# A server.


@contextmanager
def served(llm: LLM, **settings: Any) -> Iterator[str]:
    from tllm_wmtp.serving.openai.server import Server, bind, url
    from tllm_wmtp.serving.openai.settings import ServerSettings

    with bind("127.0.0.1", 0) as listener:
        address, up = url(listener), threading.Event()
        server = Server(llm, ServerSettings(served_name="tiny", **settings), None, up.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            assert up.wait(120)
            yield address
        finally:
            server.should_exit = True
            thread.join(120)


@pytest.fixture(scope="module")
def address(checkpoint: Path) -> Iterator[str]:
    with (
        LLM(checkpoint, MtpConfig(4, 24, 4), max_seq_len=512, max_batch_size=4) as llm,
        served(llm, api_key="secret") as address,
    ):
        yield address


def target(address: str, more: str = "") -> str:
    return (
        f"target: {{kind: openai, url: '{address}', model: tiny, api_key_env: TEST_KEY{more}}}\n"
        "arms: [windowed]\n"
    )


def test_a_server_gives_the_tokens_of_the_embedded_runtime(
    suite_file: Callable[[str], Path],
    tmp_path: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_KEY", "secret")
    text = SUITE.replace("repeats: 2\n", "repeats: 1\nbatches: [2]\n")
    ours = runner.run_suite(load(suite_file(text + "arms: [dense]\n")), tmp_path, Quiet())
    watch = Quiet()
    suite = load(suite_file(text + target(f"{address}/v1/")))
    theirs = runner.run_suite(suite, tmp_path, watch)
    assert not watch.failures
    (row,), (dense,) = theirs.rows, ours.rows
    assert row.output_digest == dense.output_digest
    assert (row.n_runs, row.prompt_tokens, row.output_tokens) == (2, 2 * CONTEXT, 2 * TOKENS)
    assert row.target == "openai"
    assert row.accepted_histogram is None
    assert "accepted drafts" in row.missing["alpha"]
    assert row.al is not None
    assert 1 <= row.al <= 4
    assert row.ttft_s is not None
    assert row.ttft_s > 0
    assert row.tpot_ms == pytest.approx(row.t_iter_ms * row.b_eff / row.al)  # type: ignore[operator]
    assert row.config["target"]["api_key_env"] == "TEST_KEY"
    assert "secret" not in row.line()
    # The same prompts again, in another file: the server has them, so the time is not a prefill's.
    again = runner.run_suite(suite, tmp_path / "again", Quiet()).rows[0]
    assert again.ttft_s is None
    assert "from before" in again.missing["ttft_s"]


def test_tokens_are_counted_where_a_server_gives_no_ids(
    suite_file: Callable[[str], Path],
    tmp_path: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_KEY", "secret")
    text = SUITE.replace("repeats: 2", "seeds: [4]") + target(address, ", return_token_ids: false")
    (row,) = runner.run_suite(load(suite_file(text)), tmp_path, Quiet()).rows
    assert row.output_digest is None
    assert "token ids" in row.missing["output_digest"]
    assert row.output_tokens == TOKENS
    assert row.al is not None


@pytest.mark.parametrize(
    ("key", "model", "words"),
    [("wrong", "tiny", "status 401"), ("secret", "other", "serves 'tiny'")],
)
def test_a_server_that_will_not_serve_is_named(
    key: str,
    model: str,
    words: str,
    wmtp: Run,
    suite_file: Callable[[str], Path],
    tmp_path: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_KEY", key)
    text = SUITE + target(address).replace("model: tiny", f"model: {model}")
    code, _, err = wmtp("bench", "run", suite_file(text), "--out", tmp_path / "out")
    assert code == 2
    assert words in err


def test_a_request_that_a_server_refuses_fails_its_cell(
    suite_file: Callable[[str], Path],
    tmp_path: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_KEY", "secret")
    text = SUITE.replace("[200]", "[200, 600]").replace("repeats: 2\n", "") + target(address)
    watch = Quiet()
    outcome = runner.run_suite(load(suite_file(text)), tmp_path, watch)
    assert [row.context for row in outcome.rows] == [200]
    ((cell, error),) = watch.failures
    assert cell.context == 600
    assert "max_seq_len is 512" in str(error)
