"""Suites: which cells a YAML file means, and what is refused, by file and line."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tllm_wmtp.bench.sweep.cells import Cell, engines_key, in_groups, prompts_key
from tllm_wmtp.bench.sweep.suite import KEYS, Names, Suite, load_suite
from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import WmtpError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def load(tmp_path: Path, model: Path) -> object:
    def load(text: str) -> Suite:
        file = tmp_path / "suite.yaml"
        file.write_text(textwrap.dedent(text).replace("MODEL", str(model)))
        return load_suite(file, Names(arguments.count, arguments.context, lambda name: Path(name)))

    return load


def settings(suite: Suite) -> list[tuple[object, ...]]:
    return [(c.arm, c.depth, c.window, c.n_sink) for c in suite.cells]


def test_the_axes_are_multiplied_and_what_an_arm_has_not_is_left_out(load) -> None:  # type: ignore[no-untyped-def]
    suite = load(
        """
        models: [MODEL]
        inputs: [logs]
        contexts: [4k]
        depths: [3, 5]
        windows: [256, 512]
        sinks: [16]
        """
    )
    assert settings(suite) == [
        ("dense", 1, None, 0),
        ("native", 3, None, 0),
        ("native", 5, None, 0),
        ("windowed", 3, 256, 16),
        ("windowed", 3, 512, 16),
        ("windowed", 5, 256, 16),
        ("windowed", 5, 512, 16),
    ]
    cell = suite.cells[0]
    assert (cell.context, cell.dtype, cell.kv_dtype, cell.batch) == (4096, "float32", "float32", 1)
    assert (cell.sampling.max_tokens, cell.sampling.temperature, cell.requests) == (128, 0.0, 1)


def test_sweeps_share_defaults_and_cells(load) -> None:  # type: ignore[no-untyped-def]
    suite = load(
        """
        defaults: {models: [MODEL], inputs: [logs], max_tokens: 40, seeds: [3]}
        sweeps:
          - contexts: [1m]
            arms: dense
          - contexts: [1m]
            arms: [dense, windowed]
            seeds: [3, 4]
            kv_dtypes: [auto, float32]
            repetition_penalty: 1
          - contexts: [1m]
            max_tokens: 41
            arms: [dense]
        """
    )
    assert [(c.arm, c.seed, c.sampling.max_tokens) for c in suite.cells] == [
        ("dense", 3, 40),
        ("windowed", 3, 40),
        ("dense", 4, 40),
        ("windowed", 4, 40),
        ("dense", 3, 41),
    ]
    assert suite.cells[0].context == 1_040_000
    assert len({c.digest for c in suite.cells}) == len(suite.cells)


def test_a_suite_is_named_by_its_cells_alone(load) -> None:  # type: ignore[no-untyped-def]
    text = "models: [MODEL]\ninputs: [logs]\ncontexts: [4096]\n"
    plain = load(text)
    assert plain.digest == load("# a comment\n" + text.replace("4096", "4k")).digest
    others = [
        "seeds: [1]", "max_tokens: 64", "temperature: 0.5", "repetition_penalty: 1.15",
        "ignore_eos: true", "repeats: 2", "prefill_chunk: 512", "dtype: bfloat16", "batches: 2",
        "top_k: 5", "device: cuda", "arms: [dense]", "kv_dtypes: [bfloat16]",
        "target: {kind: openai, url: 'http://x', model: m}",
    ]  # fmt: skip
    digests = {load(text + each).digest for each in others}
    assert len(digests | {plain.digest}) == len(others) + 1


def test_inputs_have_options_of_their_task(load) -> None:  # type: ignore[no-untyped-def]
    suite = load(
        """
        models: [MODEL]
        inputs:
          - {task: niah_multikey, lexicon: demo, difficulty: hard, keys: 8}
          - {task: babilong, path: facts.json}
        contexts: [4k]
        arms: [dense]
        """
    )
    first, second = (cell.input for cell in suite.cells)
    assert (first.lexicon, first.difficulty, first.options) == ("demo", "hard", {"keys": 8})
    assert (second.task, second.path) == ("babilong", "facts.json")


def test_servers_are_what_the_suite_says_of_them(load) -> None:  # type: ignore[no-untyped-def]
    suite = load(
        """
        models: [MODEL]
        inputs: [logs]
        contexts: [4k]
        target: {kind: openai, url: "http://127.0.0.1:8000", model: q35, api_key_env: KEY}
        dtype: nvfp4
        kv_dtypes: [fp8]
        arms: [windowed]
        """
    )
    (cell,) = suite.cells
    assert (cell.target.kind, cell.target.model, cell.dtype, cell.kv_dtype) == (
        "openai", "q35", "nvfp4", "fp8",
    )  # fmt: skip


GOOD = "models: [MODEL]\ninputs: [logs]\ncontexts: [4k]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "depth: [3]", "line 4: key 'depth'.*the keys are inputs, contexts"),
        (GOOD + "contexts: [8k]", "line 4: key 'contexts'.*in line 3"),
        (GOOD + "depths: [1]", "depth 1.*depth >= 2"),
        (GOOD + "depths: []", "line 4: depths: an empty list"),
        (GOOD + "depths: [x]", "line 4: depths: 'x'"),
        (GOOD + "depths: [3.5]", "line 4: depths: 3.5"),
        (GOOD + "depths: [true]", "line 4: depths: True"),
        (GOOD + "windows: [0]", "line 4: windows: 0.*1 or more"),
        (GOOD + "sinks: [-1]", "line 4: sinks: -1"),
        (GOOD + "batches: [0]", "line 4: batches"),
        (GOOD + "arms: [sparse]", "line 4: arms: 'sparse'.*dense, native, windowed"),
        (GOOD + "seeds: [-1]", "line 4: seeds: -1"),
        (GOOD + "seeds: [a]", "line 4: seeds: 'a'"),
        (GOOD + "temperature: hot", "line 4: temperature 'hot'"),
        (GOOD + "temperature: -1", "line 4: temperature -1.0"),
        (GOOD + "temperature: .nan", "line 4: temperature nan"),
        (GOOD + "temperature: true", "line 4: temperature True"),
        (GOOD + "repetition_penalty: 0", "line 4: repetition_penalty 0.0"),
        (GOOD + "max_tokens: 0", "line 4: max_tokens: 0"),
        (GOOD + "ignore_eos: 1", "line 4: ignore_eos 1"),
        (GOOD + "dtype: fp8", "line 4: dtype: 'fp8'"),
        (GOOD + "kv_dtypes: [fp8]", "line 4: kv_dtypes: 'fp8'"),
        (GOOD + "device: tpu", "device 'tpu'"),
        (GOOD + "prefill_chunk: 0", "line 4: prefill_chunk"),
        (GOOD + "target: cloud", "line 4: target: kind 'cloud'.*embedded, openai, triton"),
        (GOOD + "target: {kind: openai}", "line 4: target: a target openai without url"),
        (GOOD + "target: {kind: openai, url: x, model: m}", "line 4: target: url 'x'.*http"),
        (GOOD + "target: {kind: triton, url: 'http://x', model: m}", "has no scheme"),
        (GOOD + "target: {kind: openai, url: 'http://a:b@x', model: m}", "api_key_env"),
        (GOOD + "target: {kind: openai, key: abc}", "line 4: target: 'key'"),
        (GOOD + "target: {kind: embedded, url: x}", "the embedded target has no address"),
        (GOOD + "target: [embedded]", "line 4: target"),
        ("models: [MODEL]\ninputs: [poems]\ncontexts: [4k]", "line 2: inputs: task 'poems'"),
        ("models: [MODEL]\ninputs: [{task: vt, hop: 3}]\ncontexts: [4k]", "line 2.*'hop'"),
        ("models: [MODEL]\ninputs: [{task: vt, lexicon: x}]\ncontexts: [4k]", "lexicon 'x'"),
        ("models: [no-such]\ninputs: [logs]\ncontexts: [4k]", "line 1: models: 'no-such'"),
        ("models: [MODEL]\ncontexts: [4k]", "line 1: a sweep without inputs"),
        ("models: [MODEL]\ninputs: [logs]\ncontexts: [0]", "line 3: contexts: 0"),
        ("sweeps: []", "line 1: sweeps"),
        ("sweeps: [3]", "line 1: sweeps 3"),
        ("sweeps:\n- inputs: [logs]\nother: 1", "line 3: key 'other'"),
        ("defaults: {depth: 3}\nsweeps:\n- {inputs: logs, contexts: 4k}", "line 1: key 'depth'"),
        ("- 3", "must be a mapping"),
        ("", "must be a mapping"),
        ("a: [", "must be YAML"),
        ("1: 2", "line 1: key 1"),
        ("a: !!python/object/apply:os.getcwd []", "must be YAML"),
        (GOOD + "seeds: [" + ",".join(map(str, range(4000))) + "]", "12,000 cells.*at most 10,000"),
    ],
)  # fmt: skip
def test_what_a_suite_must_not_hold(load, text: str, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WmtpError, match=words) as refused:
        load(text)
    message = str(refused.value)
    assert "suite.yaml" in message
    assert "\n" not in message
    assert message.count("; ") >= 1


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    names = Names(arguments.count, arguments.context, Path)
    with pytest.raises(WmtpError, match="cannot be read"):
        load_suite(tmp_path / "none.yaml", names)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WmtpError, match="must be YAML"):
        load_suite(tmp_path / "bytes.yaml", names)


ROOT = Path(__file__).resolve().parents[2]


def test_the_suite_that_is_shipped_has_every_axis() -> None:
    names = Names(arguments.count, arguments.context, arguments.model_directory)
    cells = load_suite(ROOT / "docs/benchmarks/suite.yaml", names).cells
    assert {cell.model for cell in cells} == {"demo", "demo-mamba2"}
    assert {cell.arm for cell in cells} == {"dense", "native", "windowed"}
    long = [cell for cell in cells if cell.context == 16384 and cell.input.task == "logs"]
    assert {cell.window for cell in long} == {None, 256, 512, 1024, 2048, 4032}
    assert {cell.depth for cell in long} == {1, 3, 5, 7, 9}
    assert {cell.kv_dtype for cell in long} == {"float32", "bfloat16"}
    assert {cell.batch for cell in cells} == {1, 2, 4, 8}


def test_the_suites_of_the_manual_are_suites(tmp_path: Path) -> None:
    page = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    names = Names(arguments.count, arguments.context, arguments.model_directory)
    shown = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for text in shown:
        (tmp_path / "suite.yaml").write_text(text)
        assert load_suite(tmp_path / "suite.yaml", names).cells
    table = set(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    told = {name for cells in table for name in re.findall(r"`(\w+)`", cells)}
    assert told == set(KEYS)


# How cells are run together.


def test_cells_share_prompts_and_engines_as_far_as_they_can(load) -> None:  # type: ignore[no-untyped-def]
    suite = load(
        """
        models: [MODEL]
        inputs: [logs, sentences]
        contexts: [4k]
        batches: [1, 2]
        """
    )
    assert [len(group) for group in in_groups(suite.cells, engines_key)] == [6, 6]
    assert [len(group) for group in in_groups(suite.cells, prompts_key)] == [3, 3, 3, 3]


def test_a_cell_asks_the_engine_for_room_for_its_batch(load) -> None:  # type: ignore[no-untyped-def]
    (cell,) = load(GOOD + "arms: [windowed]\nbatches: [3]\nmax_tokens: 100").cells
    limits = cell.engine_config
    assert limits.max_seq_len == 4096 + 100
    assert limits.max_batch_size == 3
    assert (limits.kv_cache.max_tokens or 0) >= 3 * (4096 + 100 + 7)
    assert not limits.kv_cache.enable_block_reuse


def test_longer_and_native_cells_are_expected_to_take_longer(load) -> None:  # type: ignore[no-untyped-def]
    def cost(extra: str) -> float:
        cells: tuple[Cell, ...] = load(GOOD.replace("4k", "64k") + extra).cells
        return cells[0].cost

    windowed = cost("arms: [windowed]")
    assert cost("arms: [native]") > 2 * windowed
    assert cost("arms: [windowed]\nrepeats: 3") == pytest.approx(3 * windowed)
    assert cost("arms: [windowed]\nbatches: [2]") == pytest.approx(2 * windowed)
    assert cost("arms: [windowed]\nmax_tokens: 512") > windowed
