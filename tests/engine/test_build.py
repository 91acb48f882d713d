"""Engine directories: what is in them, the cache, and failures that leave nothing behind.

The builder is TensorRT-RTX itself, ahead of time for SM120, with the plugin inside.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import q35_checkpoint
import tiny_families
import tiny_nemotron
import toolchain
from nvfp4_checkpoint import quantized_copy

from tllm_wmtp.cli import main
from tllm_wmtp.demo import CHECKPOINT
from tllm_wmtp.engine import backends, build, plugin
from tllm_wmtp.engine.backends import BuildError
from tllm_wmtp.engine.build import BuildOptions, build_engine
from tllm_wmtp.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.trt
SMALL = BuildOptions(lanes=2, window=256, n_sink=16, depth=5, max_rows=32)
FILES = ["build.log", "config.json", "draft.engine", "draft.onnx"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, builder: None) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def nvfp4_engine(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, nvfp4_demo: Path
) -> build.Built:
    out = tmp_path_factory.mktemp("engines") / "nvfp4"
    return build_engine(nvfp4_demo, out, SMALL, cache)


def test_nvfp4_head_with_the_plugin_compiles_for_sm120(nvfp4_engine: build.Built) -> None:
    """All linear layers and experts in FP4; the engine carries the plugin's name and fields."""
    directory, config = nvfp4_engine.directory, nvfp4_engine.config
    assert not nvfp4_engine.cached
    held = sorted(file.name for file in directory.iterdir())
    assert [name for name in held if not name.endswith(".data")] == FILES
    engine = (directory / "draft.engine").read_bytes()
    assert config["engine"]["bytes"] == len(engine)
    for name in (b"WindowedDraftAttention", b"workspace_bytes"):
        assert name in engine
    assert b"TRT_FP4DynamicQuantize" in (directory / "draft.onnx").read_bytes()
    assert config["options"]["weights"] == "nvfp4"
    assert len(config["nvfp4_weights"]) == 10
    log = (directory / "build.log").read_text()
    assert "ERROR" not in log
    assert "Inserting copy" not in log


def test_the_same_build_again_is_a_copy_from_the_cache(
    nvfp4_engine: build.Built, cache: Path, nvfp4_demo: Path, tmp_path: Path
) -> None:
    begin = time.monotonic()
    again = build_engine(nvfp4_demo, tmp_path / "again", SMALL, cache)
    assert time.monotonic() - begin < 5
    assert again.cached
    for name in FILES:
        original = (nvfp4_engine.directory / name).read_bytes()
        assert (again.directory / name).read_bytes() == original
    assert again.config == nvfp4_engine.config


def test_moved_checkpoint_is_the_same_engine(
    nvfp4_engine: build.Built, cache: Path, nvfp4_demo: Path, tmp_path: Path
) -> None:
    """Weights count, not where they lie."""
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in nvfp4_demo.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert build_engine(moved, tmp_path / "out", SMALL, cache).cached


def test_other_choice_or_other_weight_is_another_engine(
    cache: Path, nvfp4_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the key is at stake: the compiler is told to refuse."""

    def refuse(*args: object) -> None:
        raise BuildError("compiled", "it was not in the cache", "none")

    monkeypatch.setattr("tllm_wmtp.engine.compose.compile_graph", refuse)
    with pytest.raises(BuildError, match="compiled"):
        build_engine(nvfp4_demo, tmp_path / "a", BuildOptions(lanes=3), cache)
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in nvfp4_demo.iterdir():
        content = bytearray(file.read_bytes())
        if file.name == "model.safetensors":
            content[-1] ^= 1
        (changed / file.name).write_bytes(content)
    with pytest.raises(BuildError, match="compiled"):
        build_engine(changed, tmp_path / "b", SMALL, cache)


def test_failing_builder_leaves_nothing_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is no plugin: the real builder refuses it, in its own process."""
    library = tmp_path / "libnothing.so"
    library.write_bytes(b"nothing")
    monkeypatch.setattr(build, "find_plugin", lambda: library)
    out = tmp_path / "out"
    with pytest.raises(BuildError, match=r"rtx 1\.7.*refuses .*libnothing"):
        build_engine(CHECKPOINT, out, SMALL, cache)
    assert sorted(tmp_path.iterdir()) == [library]
    assert not list((cache / "engines").glob(".building-*"))


def test_failing_build_keeps_the_builders_log(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser looks for a version of the plugin that there is not."""
    monkeypatch.setattr(plugin, "VERSION", "7")
    with pytest.raises(BuildError, match=r"step 'parse'.*failed-build\.log"):
        build_engine(CHECKPOINT, tmp_path / "out", SMALL, cache)
    assert "WindowedDraftAttention" in (cache / "failed-build.log").read_text()
    assert list(tmp_path.iterdir()) == []


def test_earlier_engine_is_replaced_and_other_files_are_not(
    nvfp4_engine: build.Built, cache: Path, nvfp4_demo: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        build_engine(nvfp4_demo, out, SMALL, cache)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="it holds files that are no engine"):
        build_engine(nvfp4_demo, tmp_path / "mine", SMALL, cache)
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"


def test_damaged_cache_entry_is_built_again_and_damaged_directory_named(
    nvfp4_engine: build.Built,
    nvfp4_demo: Path,
    tmp_path: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One flipped byte in the engine; the compiler is told to refuse, so a rebuild is seen."""
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    out = build_engine(nvfp4_demo, tmp_path / "out", SMALL, own).directory
    engine = next((own / "engines").glob("*/draft.engine"))
    content = bytearray(engine.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (engine, out / "draft.engine"):
        damaged.unlink()
        damaged.write_bytes(content)

    def refuse(*args: object) -> None:
        raise BuildError("compiled", "it was not in the cache", "none")

    monkeypatch.setattr("tllm_wmtp.engine.compose.compile_graph", refuse)
    with pytest.raises(BuildError, match="compiled"):
        build_engine(nvfp4_demo, tmp_path / "again", SMALL, own)
    assert main(["inspect", str(out)]) == 2
    assert "it is missing or damaged; build it again" in capsys.readouterr().err
    (out / "config.json").write_text(json.dumps({"schema": "tllm-wmtp engine 1"}))
    assert main(["inspect", str(out)]) == 2
    assert "lacks what a build writes there" in capsys.readouterr().err


def test_file_of_the_users_keeps_an_earlier_engine_from_being_replaced(
    nvfp4_engine: build.Built, cache: Path, nvfp4_demo: Path, tmp_path: Path
) -> None:
    out = build_engine(nvfp4_demo, tmp_path / "out", SMALL, cache).directory
    (out / "notes.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"with 'notes\.txt': .*no build made this file"):
        build_engine(nvfp4_demo, out, SMALL, cache)
    assert (out / "notes.txt").read_text() == "years of work"


def test_changed_weights_with_the_old_size_and_time_are_another_engine(
    nvfp4_engine: build.Built,
    cache: Path,
    nvfp4_demo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(nvfp4_demo, model)
    assert build_engine(model, tmp_path / "a", SMALL, cache).cached
    weights = model / "model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))

    def refuse(*args: object) -> None:
        raise BuildError("compiled", "it was not in the cache", "none")

    monkeypatch.setattr("tllm_wmtp.engine.compose.compile_graph", refuse)
    with pytest.raises(BuildError, match="compiled"):
        build_engine(model, tmp_path / "b", SMALL, cache)


def test_bindings_without_their_libraries_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "rtx_folder", lambda: tmp_path)
    with pytest.raises(ConfigError, match=r"libraries .*are not; run `make engine-tools`"):
        backends.find_backend("rtx", "sm120", tmp_path / "links")


def test_make_engine_runs_the_documented_commands() -> None:
    """`make engine` and its page say the same, but for the folder."""
    page = (toolchain.REPOSITORY / "docs/draft-engines.md").read_text()
    documented = re.findall(r"^wmtp .*demo-.*$", page, re.MULTILINE)[:3]
    make = ["make", "--dry-run", "--always-make", "engine"]
    shown = subprocess.run(make, cwd=toolchain.REPOSITORY, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    found = re.findall(r"\.venv/bin/(wmtp .*)$", shown.stdout.replace("build/", ""), re.MULTILINE)
    assert found == documented
    assert len(found) == 3


def test_missing_tools_are_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package alone in another folder: neither plugin nor TensorRT-RTX are near it."""
    monkeypatch.setattr(plugin, "__file__", str(tmp_path / "tllm_wmtp/engine/plugin.py"))
    with pytest.raises(plugin.PluginMissing, match="run `make engine-tools`"):
        plugin.find_plugin()
    monkeypatch.setattr(backends, "__file__", str(tmp_path / "tllm_wmtp/engine/backends.py"))
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed; run `make engine-tools`"):
        backends.rtx_folder()


def test_inspect_prints_what_was_built(
    nvfp4_engine: build.Built, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(nvfp4_engine.directory)]) == 0
    table = capsys.readouterr().out
    assert "nvfp4, 10 weights in NVFP4" in table
    assert "2 lanes of 277 slots (sink 16 + window 256 + depth 5), bfloat16" in table
    assert main(["inspect", str(nvfp4_engine.directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == nvfp4_engine.config


def test_script_builds_like_the_command(
    nvfp4_engine: build.Built,
    cache: Path,
    nvfp4_demo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = toolchain.script("build_scripts/build_draft_engine.py")
    arguments = ["--model", str(nvfp4_demo), "--out", str(tmp_path / "out"), "--json"]
    arguments += ["--lanes", "2", "--window", "256", "--n-sink", "16", "--depth", "5"]
    arguments += ["--max-rows", "32", "--cache-dir", str(cache)]
    monkeypatch.setattr("sys.argv", ["build_draft_engine.py", *arguments])
    assert script.run() == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cached"] is True
    assert answer["config"] == nvfp4_engine.config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "nvfp4"], "quantize it first (wmtp quantize"),
        (["--target", "sm90"], "TensorRT-RTX compiles for sm75"),
        (["--window", "0"], "window 0: it must be 1 or more"),
        (["--depth", "1"], "depth 1: it must be 2 or more"),
        (["--lanes", "8", "--max-rows", "4"], "every one of 8 lanes feeds a row"),
        (["--window", "2m"], "= 2097216: the model has 1048576 positions"),
        (["--backend", "tensorrt"], "backend 'tensorrt'"),
        (["--top-k", "641"], "TensorRT finds at most 640 of 640 tokens"),
        (["--max-seq-len", "64"], "max_seq_len 64 of a draft engine"),
    ],
)
def test_bad_input_is_named(
    builder: None,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    common = ["--model", "demo", "--out", str(out), "--cache-dir", str(tmp_path / "cache")]
    assert main(["build", *common, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_fp4_needs_a_gpu_that_has_it(builder: None, nvfp4_demo: Path, tmp_path: Path) -> None:
    options = BuildOptions(target="sm89")
    with pytest.raises(ConfigError, match="FP4 matrix products need .*use --weights bf16"):
        build_engine(nvfp4_demo, tmp_path / "out", options, tmp_path / "cache")


def test_checkpoint_without_head_is_named(builder: None, tmp_path: Path) -> None:
    from tiny_model import hf_config, random_weights, write_checkpoint

    config = hf_config()
    weights = {k: v for k, v in random_weights(config).items() if not k.startswith("mtp.")}
    model = write_checkpoint(tmp_path / "model", config, weights)
    with pytest.raises(CheckpointError, match=r"has no mtp\.\* tensors"):
        build_engine(model, tmp_path / "out", SMALL, tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "nemotron_h"])
def test_heads_of_other_families_compile_in_nvfp4(
    family: str, builder: None, tmp_path: Path
) -> None:
    if family == "nemotron_h":
        plain = tiny_nemotron.tiny_checkpoint(tmp_path / "plain")
    else:
        plain = tiny_families.tiny_checkpoint(tmp_path / "plain", family)
    model = quantized_copy(plain, tmp_path / "model")
    built = build_engine(model, tmp_path / "out", SMALL, tmp_path / "cache")
    assert len(built.config["nvfp4_weights"]) >= 7


def test_latent_heads_are_too_wide_for_the_plugin(builder: None, tmp_path: Path) -> None:
    model = tiny_families.tiny_checkpoint(tmp_path / "model", "deepseek_v3", kv_lora_rank=512)
    with pytest.raises(ConfigError, match="heads 528 wide: the plugin serves"):
        build_engine(model, tmp_path / "out", SMALL, tmp_path / "cache")


@pytest.fixture
def large_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for gigabytes, which no later run needs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_full_size_head_compiles(builder: None, large_folder: Path) -> None:
    """Qwen3.5-35B-A3B's head: 256 experts, a vocabulary of 248,320."""
    model = q35_checkpoint.write(large_folder / "model")
    out, cache = large_folder / "out", large_folder / "cache"
    built = build_engine(model, out, BuildOptions(lanes=8), cache, print)
    engine, graph = built.config["engine"], built.config["graph"]
    print(f"{engine['bytes']:,} bytes in {engine['seconds']} s, graph {graph['bytes']:,} bytes")
    # Embedding and lm_head in bfloat16, experts at five bits a value, the rest below 100 MB.
    ends = 2 * 2 * q35_checkpoint.VOCAB * q35_checkpoint.HIDDEN
    experts = 3 * q35_checkpoint.EXPERTS * q35_checkpoint.EXPERT_SIZE * q35_checkpoint.HIDDEN
    assert ends + experts * 5 / 8 < engine["bytes"] < ends + experts * 5 / 8 + 100e6
    assert len(built.config["nvfp4_weights"]) == 10
