"""Writing NVFP4 copies: what is quantized, what an interrupted run leaves, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_nemotron
import torch
from quantized import decode_nvfp4
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_model import (
    add_byte_tokenizer,
    hf_config,
    random_weights,
    split_experts,
    tiny_checkpoint,
    write_checkpoint,
)

from tllm_wmtp.checkpoint import quantize
from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.checkpoint.partial import PartialDirectory
from tllm_wmtp.checkpoint.quantize import Calibration, Summary, quantize_checkpoint
from tllm_wmtp.checkpoint.recipe import Recipe
from tllm_wmtp.cli import main
from tllm_wmtp.errors import CheckpointError, RequestError

TOKENS = Calibration([list(range(1, 40)), list(range(50, 80))])
SHARD = 40_000  # bytes: several shards of the tiny model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source"))


def copy_of(source: Path, out: Path, **options: Any) -> Summary:
    recipe = options.pop("recipe", Recipe())
    return quantize_checkpoint(source, out, recipe, options.pop("calibration", TOKENS), **options)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def packed_modules(path: Path) -> set[str]:
    return {
        name.removesuffix(".weight_scale_2")
        for name in tensors_of(path)
        if name.endswith(".weight_scale_2")
    }


def expected_modules(head: bool) -> set[str]:
    blocks = [f"model.layers.{layer}" for layer in range(4)] + ["mtp.layers.0"] * head
    modules = set()
    for block in blocks:
        attention = block in ("model.layers.3", "mtp.layers.0")
        mixer = (
            [f"self_attn.{name}_proj" for name in "qkvo"]
            if attention
            else [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")]
        )
        experts = [f"mlp.experts.{e}" for e in range(4)] + ["mlp.shared_expert"]
        mixer += [f"{e}.{part}_proj" for e in experts for part in ("gate", "up", "down")]
        modules |= {f"{block}.{name}" for name in mixer}
    return modules


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_projections_are_quantized_and_nothing_else_changes(
    tmp_path: Path, head: bool, split: bool
) -> None:
    config = hf_config()
    weights = random_weights(config)
    stored = split_experts(weights) if split else weights
    source = write_checkpoint(tmp_path / "source", config, stored)
    summary = copy_of(source, tmp_path / "out", recipe=Recipe(mtp=head))
    tensors = tensors_of(tmp_path / "out")
    packed = packed_modules(tmp_path / "out")
    assert packed == expected_modules(head)
    assert summary.quantized == len(expected_modules(head))
    plain = split_experts(weights)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.uint8:
            module = name.removesuffix(".weight")
            values = decode_nvfp4(tensor, tensors[f"{module}.weight_scale"])
            values *= tensors[f"{module}.weight_scale_2"].item()
            error = abs(values - plain[name].double().numpy()).max()
            # Half of E2M1's widest step, 1 of 6, and the rounding of the block's scale, 1 of 16.
            assert error < (1 / 6 + 1 / 16) * plain[name].abs().max().item(), name
        elif name.rpartition(".")[0] not in packed:
            assert torch.equal(tensor, stored[name]), name
    kept = {name for name in stored if name in tensors and tensors[name].dtype != torch.uint8}
    assert {"mtp.fc.weight", "model.embed_tokens.weight", "model.norm.weight"} <= kept
    statement = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert "lm_head" in statement["exclude_modules"]
    assert "model.layers.0.mlp.gate" in statement["exclude_modules"]
    assert ("mtp.layers.0.self_attn.q_proj" in statement["exclude_modules"]) == (not head)
    load_model(tmp_path / "out", with_head=True)


def test_projections_that_are_computed_together_share_their_scales(
    source: Path, tmp_path: Path
) -> None:
    copy_of(source, tmp_path / "out")
    tensors = tensors_of(tmp_path / "out")

    def scales(*modules: str) -> set[tuple[float, float]]:
        parts = ("weight_scale_2", "input_scale")
        return {tuple(tensors[f"{m}.{part}"].item() for part in parts) for m in modules}  # type: ignore[misc]

    attention = [f"model.layers.3.self_attn.{name}_proj" for name in "qkvo"]
    assert len(scales(*attention[:3])) == 1
    assert len(scales(*attention)) == 2
    expert = [f"model.layers.0.mlp.experts.2.{part}_proj" for part in ("gate", "up", "down")]
    assert len(scales(*expert[:2])) == 1
    assert len(scales(*expert)) == 2
    largest = CheckpointDirectory(source).tensor("model.layers.0.mlp.experts.gate_up_proj")[2]
    expected = largest.abs().max().item() / (6 * 448)
    assert tensors[f"{expert[0]}.weight_scale_2"].item() == pytest.approx(expected, rel=1e-6)
    recurrent = [f"model.layers.0.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z")]
    assert len(scales(*recurrent)) == 1


def test_without_calibration_there_are_no_input_scales(source: Path, tmp_path: Path) -> None:
    summary = copy_of(source, tmp_path / "out", calibration=None)
    assert summary.algorithm == "W4A16_NVFP4"
    assert not any(name.endswith("input_scale") for name in tensors_of(tmp_path / "out"))
    directory = CheckpointDirectory(tmp_path / "out")
    assert directory.quantization is not None
    assert directory.quantization.algorithm == "W4A16_NVFP4"


def test_a_dense_model_is_quantized_too(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", moe=False)
    copy_of(source, tmp_path / "out")
    assert "model.layers.2.mlp.up_proj" in packed_modules(tmp_path / "out")
    load_model(tmp_path / "out", with_head=True)


FAMILIES = {
    "mimo": ("model.mtp_layers.0.mlp.up_proj", "model.mtp_layers.0.input_proj"),
    "glm4_moe": ("model.layers.3.mlp.experts.7.down_proj", "model.layers.3.eh_proj"),
    "deepseek_v3": ("model.layers.3.self_attn.o_proj", "model.layers.3.self_attn.kv_b_proj"),
    "nemotron_h": ("mtp.layers.1.mixer.experts.0.up_proj", "mtp.layers.1.mixer.gate"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_quantized_with_its_head(tmp_path: Path, family: str) -> None:
    path = tmp_path / "source"
    if family == "nemotron_h":
        source = tiny_nemotron.tiny_checkpoint(path)
    else:
        pytest.importorskip("transformers")
        import tiny_families

        source = tiny_families.tiny_checkpoint(path, family)
    copy_of(source, tmp_path / "out")
    quantized, kept = FAMILIES[family]
    packed = packed_modules(tmp_path / "out")
    assert quantized in packed
    assert kept not in packed
    statement = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {kept, "lm_head"} <= set(statement["ignore"])
    load_model(tmp_path / "out", with_head=True)


@pytest.mark.parametrize("pattern", ["model.layers.3", "*layers.3*", r"re:model\.layers\.3\."])
def test_excluded_modules_stay_as_they_are(source: Path, tmp_path: Path, pattern: str) -> None:
    copy_of(source, tmp_path / "out", recipe=Recipe(exclude=(pattern,)))
    left = {name for name in expected_modules(True) if name.startswith("model.layers.3")}
    assert packed_modules(tmp_path / "out") == expected_modules(True) - left
    load_model(tmp_path / "out", with_head=True)


def test_one_projection_can_be_excluded(source: Path, tmp_path: Path) -> None:
    copy_of(source, tmp_path / "out", recipe=Recipe(exclude=("*.k_proj",)))
    gone = expected_modules(True) - packed_modules(tmp_path / "out")
    assert gone == {"model.layers.3.self_attn.k_proj", "mtp.layers.0.self_attn.k_proj"}


def test_rows_that_fill_no_block_stay_as_they_are(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", shared_expert_intermediate_size=24)
    copy_of(source, tmp_path / "out")
    packed = packed_modules(tmp_path / "out")
    assert "model.layers.0.mlp.shared_expert.down_proj" not in packed
    assert "model.layers.0.mlp.shared_expert.up_proj" in packed


# --- interruptions ----------------------------------------------------------------------------


class Interrupt:
    """Lets ``save_file`` work ``times`` times."""

    def __init__(self, times: int, error: BaseException):
        self.left, self.error, self.save = times, error, quantize.save_file

    def __call__(self, *args: Any, **options: Any) -> None:
        if self.left == 0:
            raise self.error
        self.left -= 1
        self.save(*args, **options)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(28, "no space"), OSError),
        (SafetensorError("no space"), CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_interrupted_run_leaves_nothing_under_the_name_and_is_taken_up(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    shown: type[BaseException],
) -> None:
    whole = copy_of(source, tmp_path / "whole", shard_bytes=SHARD)
    shards = len(list((tmp_path / "whole").glob("*.safetensors")))
    assert shards > 3
    with monkeypatch.context() as patch:
        patch.setattr(quantize, "save_file", Interrupt(2, error))
        with pytest.raises(shown):
            copy_of(source, tmp_path / "out", shard_bytes=SHARD)
    assert not (tmp_path / "out").exists()
    patched = Interrupt(shards - 2, AssertionError("wrote a finished shard again"))
    with monkeypatch.context() as patch:
        patch.setattr(quantize, "save_file", patched)
        patch.setattr(quantize, "observe", None)  # the calibration is not repeated either
        again = copy_of(source, tmp_path / "out", shard_bytes=SHARD)
    assert again.taken_up == 2
    assert whole.taken_up == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def interrupted(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        patch.setattr(quantize, "save_file", Interrupt(2, OSError(28, "no space")))
        with pytest.raises(OSError, match="no space"):
            copy_of(source, out, shard_bytes=SHARD)
    return out.with_name(f".{out.name}.partial")


def test_a_finished_shard_that_was_damaged_since_is_written_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = interrupted(source, tmp_path / "out", monkeypatch)
    file = sorted(partial.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert copy_of(source, tmp_path / "out", shard_bytes=SHARD).taken_up == 1
    copy_of(source, tmp_path / "whole", shard_bytes=SHARD)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_other_options_start_over(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(source, tmp_path / "out", monkeypatch)
    again = copy_of(source, tmp_path / "out", recipe=Recipe(mtp=False), shard_bytes=SHARD)
    assert again.taken_up == 0
    assert packed_modules(tmp_path / "out") == expected_modules(False)


def test_a_run_that_finished_nothing_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "save_file", Interrupt(0, OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        copy_of(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- what must be refused ---------------------------------------------------------------------


def test_an_existing_output_is_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        copy_of(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_in_the_partial_directorys_place_is_not_touched(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="in the way"):
        copy_of(source, tmp_path / "out")
    assert (tmp_path / ".out.partial" / "thesis.txt").read_text() == "mine"


def test_a_second_run_at_the_same_time_is_refused_and_harms_nothing(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with PartialDirectory(out, "first") as first:
        with pytest.raises(CheckpointError, match="another run is writing it"):
            quantize_checkpoint(source, out, Recipe(), None)
        first.write("a.txt", lambda path: path.write_text("whole"))
        first.publish()
    assert [file.name for file in out.iterdir()] == ["a.txt"]
    with PartialDirectory(tmp_path / "next", "same process") as later:
        later.publish()


def test_a_run_that_was_killed_while_it_began_is_not_in_the_way(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / ".empty.partial").mkdir()
    (tmp_path / ".begun.partial").mkdir()
    (tmp_path / ".begun.partial/progress.json.unfinished").write_text("")
    for name in ("empty", "begun"):
        quantize_checkpoint(source, tmp_path / name, Recipe(), None)
        assert (tmp_path / name / "model.safetensors").exists()
        assert not (tmp_path / name / "progress.json").exists()
        assert not (tmp_path / f".{name}.partial").exists()


def test_weights_changed_under_the_old_size_and_time_start_over(
    source: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(source, tmp_path / "source"))
    weights = next(source.glob("*.safetensors"))
    mark = quantize._fingerprint(CheckpointDirectory(source), Recipe(), None, "builtin", 1)
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = quantize._fingerprint(CheckpointDirectory(source), Recipe(), None, "builtin", 1)
    assert after != mark


def test_an_output_without_a_parent_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="parent directory must exist"):
        copy_of(source, tmp_path / "a" / "b")


def test_a_quantized_source_is_refused(source: Path, tmp_path: Path) -> None:
    copy_of(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"quantized already \(NVFP4\)"):
        copy_of(tmp_path / "out", tmp_path / "twice")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("model.layer.3", "no module of .* is called so"),
        ("*", "nothing to quantize"),
        ("*.experts.1.up_proj", r"gate_up_proj holds all experts"),
    ],
)
def test_exclusions_that_cannot_be_met(
    source: Path, tmp_path: Path, pattern: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        copy_of(source, tmp_path / "out", recipe=Recipe(exclude=(pattern,)))
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    config = hf_config()
    weights = random_weights(config)
    weights["model.layers.3.self_attn.k_proj.weight"][3, 5] = float("nan")
    source = write_checkpoint(tmp_path / "source", config, weights)
    with pytest.raises(CheckpointError, match=r"self_attn\.k_proj\.weight: NaN"):
        copy_of(source, tmp_path / "out", calibration=None)
    assert not (tmp_path / ".out.partial").exists()


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def readable(tmp_path: Path) -> Path:
    return add_byte_tokenizer(tiny_checkpoint(tmp_path / "readable", vocab_size=257))


def test_the_command_writes_a_copy_and_reports_it(
    readable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 4)
    arguments = ["quantize", "--model", str(readable), "--out", str(tmp_path / "out"), "--json"]
    assert main([*arguments, "--calibration", str(text), "--mtp", "bf16"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["quant_algo"] == "NVFP4"
    assert report["quantized_matrices"] == len(packed_modules(tmp_path / "out"))
    assert report["bytes"] < report["source_bytes"] / 2
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert main(["info", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["stored_bytes"] == report["bytes"]
    assert (
        main(["generate", str(tmp_path / "out"), "--prompt", "the fox", "--max-tokens", "4"]) == 0
    )


def test_the_command_says_what_is_wrong(
    readable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["quantize", "--model", str(readable), "--out", str(tmp_path / "out")]
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    (tmp_path / "short").write_text("four")
    for file, message in (
        (tmp_path / "absent", "cannot be read"),
        (tmp_path / "latin", "must be UTF-8"),
        (tmp_path / "short", "calibration text of 4 tokens"),
    ):
        assert main([*model, "--calibration", str(file)]) == 2
        assert message in capsys.readouterr().err
    (readable / "tokenizer.json").unlink()
    assert main(model) == 2
    assert "--calibration none" in capsys.readouterr().err
    assert main([*model, "--calibration", "none"]) == 0
    assert "weights only" in capsys.readouterr().out


def test_too_short_a_text_is_refused() -> None:
    from tllm_wmtp.checkpoint.calibration import token_chunks

    assert token_chunks(range(20), 100, 8) == [list(range(8)), list(range(8, 16))]
    assert token_chunks(range(20), 16, 10) == [list(range(10))]
    with pytest.raises(RequestError, match="calibration text of 7 tokens"):
        token_chunks(range(7), 100, 8)
