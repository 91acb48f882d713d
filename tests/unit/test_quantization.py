"""Quantized checkpoints: every published layout, and every way to be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized import (
    E2M1,
    GLOBAL,
    INPUT,
    Make,
    Weights,
    compressed_nvfp4,
    decode_nvfp4,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    modelopt_nvfp4,
    quantize_names,
    random_fp8,
    random_nvfp4,
)
from safetensors.torch import load_file, save_file
from tiny_model import hf_config, random_weights, split_experts, write_checkpoint

from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.checkpoint.quantization import Fp8Weight, NvFp4Weight
from tllm_wmtp.checkpoint.quantization.metadata import Modules
from tllm_wmtp.checkpoint.quantization.packing import global_scale_of, pack
from tllm_wmtp.errors import CheckpointError

CONFIG = hf_config()
WEIGHTS = split_experts(random_weights(CONFIG))
PROJECTION = "model.layers.3.self_attn.q_proj"
#: Enough for tests that read the directory alone.
ATTENTION = {name: weight for name, weight in WEIGHTS.items() if "layers.3.self_attn" in name}


def is_projection(name: str) -> bool:
    """Projections of the target; the head, the routers and in_proj_a/b stay as they are."""
    kept = ("mtp.", "mlp.gate.", "in_proj_a", "in_proj_b", "shared_expert_gate")
    return "proj" in name and not any(part in name for part in kept)


def group(**weights: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, **weights}}


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group(**weights)},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:^mtp.*"],
    }


MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "mtp*", "*mlp.gate", "model.layers.*.linear_attn.in_proj_[ab]"],
    "config_groups": {"group_0": group(num_bits=4, group_size=16)},
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["mtp"]}
LAYOUTS: dict[str, tuple[dict[str, Any], Make]] = {
    "modelopt NVFP4": (MODELOPT, modelopt_nvfp4),
    "modelopt weight-only NVFP4": (MODELOPT | {"quant_algo": "W4A16_NVFP4"}, modelopt_nvfp4),
    "modelopt FP8": (MODELOPT | {"quant_algo": "FP8"}, fp8_tensor),
    "modelopt FP8 per channel": (
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        fp8_channel,
    ),
    "compressed-tensors NVFP4": (
        compressed("nvfp4-pack-quantized", num_bits=4, group_size=16, strategy="tensor_group"),
        compressed_nvfp4,
    ),
    "compressed-tensors FP8": (
        compressed("float-quantized", num_bits=8, strategy="tensor"),
        fp8_tensor,
    ),
    "compressed-tensors FP8 per channel": (
        compressed("float-quantized", num_bits=8, strategy="channel"),
        fp8_channel,
    ),
    "compressed-tensors FP8 blocks": (
        compressed("float-quantized", num_bits=8, strategy="block", block_structure=[32, 16]),
        fp8_block(32, 16, "weight_scale"),
    ),
    "fp8 blocks": (FP8 | {"weight_block_size": [128, 128]}, fp8_block(128, 128)),
    "fp8 small blocks": (FP8 | {"weight_block_size": [48, 40]}, fp8_block(48, 40)),
}


def write_quantized(
    path: Path, quantization: dict[str, Any], stored: Weights, shards: int = 1
) -> CheckpointDirectory:
    config = CONFIG | {"quantization_config": quantization}
    return CheckpointDirectory(write_checkpoint(path, config, stored, shards=shards))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_weights_that_its_bits_mean(tmp_path: Path, layout: str) -> None:
    quantization, make = LAYOUTS[layout]
    stored, plain = quantize_names(WEIGHTS, make, is_projection)
    directory = write_quantized(tmp_path, quantization, stored, shards=2)
    assert sorted(directory.names) == sorted(plain)
    for name, expected in plain.items():
        assert directory.shape(name) == tuple(expected.shape), name
        weight = directory.tensor(name)
        assert weight.dtype == torch.float32
        # Two roundings of 2^-24 at most: of the scales' product or quotient, and of the weight.
        torch.testing.assert_close(weight, expected, rtol=2**-22, atol=0, msg=name)
        assert (directory.quantized(name) is not None) == is_projection(name), name


@pytest.mark.parametrize("layout", ["modelopt NVFP4", "compressed-tensors NVFP4", "fp8 blocks"])
def test_a_quantized_checkpoint_loads_like_the_one_it_stands_for(
    tmp_path: Path, layout: str
) -> None:
    quantization, make = LAYOUTS[layout]
    stored, _ = quantize_names(WEIGHTS, make, is_projection)
    directory = write_quantized(tmp_path / "packed", quantization, stored)
    plain = {name: directory.tensor(name) for name in directory.names}
    ours = load_model(tmp_path / "packed", with_head=True)
    other = load_model(write_checkpoint(tmp_path / "plain", CONFIG, plain), with_head=True)
    for module, same in ((ours.target, other.target), (ours.head, other.head)):
        assert module is not None
        assert same is not None
        expected = same.state_dict()
        assert module.state_dict().keys() == expected.keys()
        for name, weight in module.state_dict().items():
            assert torch.equal(weight, expected[name]), name


def test_the_engine_builder_gets_the_parts_of_either_nvfp4_layout(tmp_path: Path) -> None:
    for layout in ("modelopt NVFP4", "compressed-tensors NVFP4"):
        quantization, make = LAYOUTS[layout]
        stored, _ = quantize_names(WEIGHTS, make, is_projection)
        weight = write_quantized(tmp_path / layout, quantization, stored).quantized(
            f"{PROJECTION}.weight"
        )
        assert isinstance(weight, NvFp4Weight)
        assert weight.packed.dtype == torch.uint8
        assert weight.block_scale.dtype == torch.float8_e4m3fn
        assert weight.global_scale.shape == ()
        assert weight.global_scale.item() == pytest.approx(GLOBAL, rel=1e-6)
        assert weight.input_scale is not None
        assert weight.input_scale.item() == pytest.approx(INPUT, rel=1e-6)


def test_an_unquantized_weight_has_no_parts(tmp_path: Path) -> None:
    directory = CheckpointDirectory(write_checkpoint(tmp_path, CONFIG, WEIGHTS))
    assert directory.quantization is None
    assert directory.quantized(f"{PROJECTION}.weight") is None
    assert directory.stored_bytes(f"{PROJECTION}.weight") == 4 * 256 * 64


def test_a_mixed_checkpoint_is_read_layer_by_layer(tmp_path: Path) -> None:
    """FP8 attention and NVFP4 experts, as Model Optimizer writes MIXED_PRECISION."""

    def is_attention(name: str) -> bool:
        return "self_attn" in name and is_projection(name)

    def is_expert(name: str) -> bool:
        return "experts." in name and is_projection(name)

    stored, plain = quantize_names(WEIGHTS, fp8_tensor, is_attention)
    stored, also = quantize_names(stored, modelopt_nvfp4, is_expert)
    plain |= {name: also[name] for name in plain if is_expert(name)}
    layers = {
        name.removesuffix(".weight"): {"quant_algo": "FP8"}
        if is_attention(name)
        else {"quant_algo": "NVFP4", "group_size": 16}
        for name in plain
        if is_attention(name) or is_expert(name)
    }
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    directory = write_quantized(tmp_path, quantization, stored)
    for name, expected in plain.items():
        torch.testing.assert_close(directory.tensor(name), expected, rtol=2**-22, atol=0)
    assert isinstance(directory.quantized(f"{PROJECTION}.weight"), Fp8Weight)
    assert directory.element_type(f"{PROJECTION}.weight") == "FP8"
    expert = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert directory.element_type(expert) == "NVFP4"
    assert directory.stored_bytes(expert) == 64 * 32 // 2 + 64 * 32 // 16 + 4 + 4
    # Metadata under another prefix than the tensors': the tensors decide among what it declares.
    quantization["quantized_layers"] = {f"thinker.{name}": layers[name] for name in layers}
    directory = write_quantized(tmp_path / "renamed", quantization, stored)
    assert isinstance(directory.quantized(f"{PROJECTION}.weight"), Fp8Weight)
    # Metadata that names the layer and says otherwise.
    quantization["quantized_layers"] = layers | {PROJECTION: {"quant_algo": "NVFP4"}}
    with pytest.raises(CheckpointError, match=rf"{PROJECTION}.* F8_E4M3.*another format"):
        write_quantized(tmp_path / "wrong", quantization, stored)


def is_packed_expert(name: str) -> bool:
    return "experts." in name and is_projection(name)


def test_a_published_mixed_layout_is_read(tmp_path: Path) -> None:
    """Experts by their parent's name, lm_head in NVFP4, FP8 elsewhere, the head excluded."""
    config = hf_config(tied=False)
    weights = split_experts(random_weights(config))
    weights["lm_head.weight"] = torch.zeros(96, 64)
    stored, plain = quantize_names(
        weights, modelopt_nvfp4, lambda name: is_packed_expert(name) or name == "lm_head.weight"
    )
    stored, also = quantize_names(stored, fp8_tensor, lambda name: "linear_attn.out_proj" in name)
    plain |= {name: also[name] for name in plain if "linear_attn.out_proj" in name}
    weight_only = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    layers: dict[str, Any] = {f"model.layers.{i}.mlp.experts": weight_only for i in range(4)}
    layers |= {f"model.layers.{i}.linear_attn.out_proj": {"quant_algo": "FP8"} for i in range(3)}
    layers["lm_head"] = weight_only
    statement = {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["mtp*", "mtp.layers.0*"]}
    path = write_checkpoint(tmp_path, config, stored)
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": statement}))
    with pytest.raises(CheckpointError, match="MIXED_PRECISION .*quantized_layers must say"):
        CheckpointDirectory(path)
    # Older exports keep the layers in a file of their own.
    (path / "quant_cfg.json").write_text(json.dumps({"quantized_layers": layers}))
    directory = CheckpointDirectory(path)
    for name, expected in plain.items():
        torch.testing.assert_close(directory.tensor(name), expected, rtol=2**-22, atol=0)
    (path / "quant_cfg.json").unlink()
    statement["quantized_layers"] = layers
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": statement}))
    assert CheckpointDirectory(path).element_type("lm_head.weight") == "NVFP4"


def test_groups_alone_can_describe_a_mixed_checkpoint(tmp_path: Path) -> None:
    stored, plain = quantize_names(ATTENTION, fp8_tensor, lambda name: "q_proj" in name)
    groups = {"group_0": group(num_bits=8) | {"targets": [PROJECTION]}}
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "config_groups": groups,
    }
    directory = write_quantized(tmp_path, quantization, stored)
    torch.testing.assert_close(
        directory.tensor(f"{PROJECTION}.weight"), plain[f"{PROJECTION}.weight"]
    )


def test_blocks_of_fp8_may_have_another_size(tmp_path: Path) -> None:
    stored, plain = quantize_names(ATTENTION, fp8_block(32, 32, "weight_scale"), is_projection)
    quantization = MODELOPT | {"quant_algo": "fp8_pb_wo", "group_size": 32}
    directory = write_quantized(tmp_path, quantization, stored)
    for name, expected in plain.items():
        torch.testing.assert_close(directory.tensor(name), expected, rtol=2**-22, atol=0)


def test_groups_by_name_go_before_groups_by_class(tmp_path: Path) -> None:
    quantization = compressed("mixed-precision", num_bits=8, strategy="tensor")
    quantization["config_groups"]["group_1"] = group(num_bits=4, group_size=16) | {
        "targets": ["re:.*mlp.*_proj$"]
    }
    stored, _ = quantize_names(
        WEIGHTS, compressed_nvfp4, lambda name: "mlp" in name and is_projection(name)
    )
    stored, also = quantize_names(
        stored, fp8_tensor, lambda name: "self_attn" in name and is_projection(name)
    )
    directory = write_quantized(tmp_path, quantization, stored)
    assert directory.element_type(f"{PROJECTION}.weight") == "FP8"
    assert directory.element_type("model.layers.3.mlp.shared_expert.up_proj.weight") == "NVFP4"
    torch.testing.assert_close(
        directory.tensor(f"{PROJECTION}.weight"), also[f"{PROJECTION}.weight"]
    )


FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def fused_parts(layout: str) -> tuple[dict[str, Any], Weights, np.ndarray]:
    """Experts [4, 64, 64] in one tensor, each with its own global scale."""
    seed = torch.Generator().manual_seed(1)
    factors = torch.tensor([0.5, 0.25, 1.0, 2.0])
    if layout == "fp8":
        values = random_fp8((4, 64, 64), seed)
        scale = torch.rand(4, 2, 4, generator=seed) + 0.5
        wide = scale.double().numpy().repeat(32, 1).repeat(16, 2)
        return (
            FP8 | {"weight_block_size": [32, 16]},
            {FUSED: values, f"{FUSED}_scale_inv": scale},
            values.double().numpy() * wide,
        )
    packed, scale = random_nvfp4((4, 64, 64), seed)
    values = decode_nvfp4(packed, scale)
    if layout == "modelopt":
        parts = {
            FUSED: packed,
            f"{FUSED}_weight_scale": scale,
            f"{FUSED}_weight_scale_2": factors,
            f"{FUSED}_input_scale": torch.tensor(INPUT),
        }
        return MODELOPT, parts, values * factors.double().numpy()[:, None, None]
    parts = {
        f"{FUSED}_packed": packed,
        f"{FUSED}_scale": scale,
        f"{FUSED}_global_scale": factors[:, None],
    }
    quantization = LAYOUTS["compressed-tensors NVFP4"][0]
    return quantization, parts, values / factors.double().numpy()[:, None, None]


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "fp8"])
def test_fused_experts_are_read_in_one_piece(tmp_path: Path, layout: str) -> None:
    quantization, parts, expected = fused_parts(layout)
    weights = random_weights(CONFIG)
    del weights[FUSED]
    directory = write_quantized(tmp_path, quantization, weights | parts)
    assert directory.shape(FUSED) == (4, 64, 64)
    weight = directory.tensor(FUSED)
    torch.testing.assert_close(weight, torch.from_numpy(expected).float(), rtol=2**-22, atol=0)
    target = load_model(tmp_path).target
    assert torch.equal(target.get_parameter("layers.0.mlp.gate_up"), weight)


def test_hf_quant_config_alone_is_enough_and_may_repeat_config_json(tmp_path: Path) -> None:
    stored, plain = quantize_names(WEIGHTS, modelopt_nvfp4, is_projection)
    statement = {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head", "mtp*"],
        },
    }
    for folder, config in (
        ("alone", CONFIG),
        ("twice", CONFIG | {"quantization_config": MODELOPT}),
    ):
        path = write_checkpoint(tmp_path / folder, config, stored)
        (path / "hf_quant_config.json").write_text(json.dumps(statement))
        directory = CheckpointDirectory(path)
        assert sorted(directory.names) == sorted(plain)


def test_scales_of_a_quantized_kv_cache_are_left_out(tmp_path: Path) -> None:
    """The runtime keeps keys and values in a type of its own."""
    stored, plain = quantize_names(WEIGHTS, fp8_tensor, is_projection)
    for part in ("k_proj.k_scale", "v_proj.v_scale"):
        stored[f"model.layers.3.self_attn.{part}"] = torch.tensor(0.5)
    quantization = MODELOPT | {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    directory = write_quantized(tmp_path, quantization, stored)
    assert directory.quantization is not None
    assert directory.quantization.kv_cache == "FP8"
    assert sorted(directory.names) == sorted(plain)
    load_model(tmp_path, with_head=True)


def test_a_checkpoint_whose_kv_cache_alone_is_quantized_is_read_as_it_is(tmp_path: Path) -> None:
    weights = WEIGHTS | {"model.layers.3.self_attn.k_proj.k_scale": torch.tensor(0.5)}
    quantization = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8}}
    directory = write_quantized(tmp_path, quantization, weights)
    assert sorted(directory.names) == sorted(WEIGHTS)
    load_model(tmp_path)


@pytest.mark.parametrize("layout", ["modelopt NVFP4", "compressed-tensors NVFP4"])
def test_a_parent_that_is_excluded_for_its_own_sake_says_nothing_of_its_children(
    tmp_path: Path, layout: str
) -> None:
    quantization, make = LAYOUTS[layout]
    stored, _ = quantize_names(ATTENTION, make, is_projection)
    listed = quantization | {"ignore": ["model.layers.3.self_attn", "model.layers.3"]}
    directory = write_quantized(tmp_path, listed, stored)
    assert directory.quantized(f"{PROJECTION}.weight") is not None
    # In the fp8 dialect a parent does speak for its children.
    quantization, make = LAYOUTS["fp8 blocks"]
    stored, _ = quantize_names(ATTENTION, make, is_projection)
    listed = quantization | {"modules_to_not_convert": ["model.layers.3"]}
    with pytest.raises(CheckpointError, match=r"self_attn\.\w+\.weight of type F8.*excluded"):
        write_quantized(tmp_path / "fp8", listed, stored)


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("lm_head", ["lm_head"], ["model.lm_head", "lm_heads"]),
        ("mtp", ["mtp.fc", "mtp.layers.0.mlp.up_proj"], ["model.mtp_norm"]),
        ("*mlp.gate", ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.gate_proj"]),
        ("model.layers.6?*", ["model.layers.61.eh_proj"], ["model.layers.5.mlp.up_proj"]),
        ("re:.*mlp.gate$", ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.gate_proj"]),
        ("re:mtp.*", ["mtp.fc"], ["model.mtp.fc"]),
    ],
)
def test_patterns_of_modules(pattern: str, inside: list[str], outside: list[str]) -> None:
    modules = Modules([pattern])
    assert all(name in modules for name in inside)
    assert not any(name in modules for name in outside)


# --- what must be refused ---------------------------------------------------------------------

Change = Callable[[Weights, dict[str, Any]], Any]


def put(part: str, tensor: torch.Tensor) -> Change:
    return lambda stored, _: stored.__setitem__(f"{PROJECTION}.{part}", tensor)


def lose(part: str) -> Change:
    return lambda stored, _: stored.pop(f"{PROJECTION}.{part}")


def say(**changes: Any) -> Change:
    return lambda _, quantization: quantization.update(changes)


def e4m3(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


DAMAGES: dict[str, tuple[str, Change, str]] = {
    "unknown method": ("modelopt NVFP4", say(quant_method="awq"), "quantization awq .*config.json"),
    "unknown algorithm": (
        "modelopt NVFP4",
        say(quant_algo="NVFP4_AWQ"),
        "quantization NVFP4_AWQ",
    ),
    "other group size": ("modelopt NVFP4", say(group_size=32), "NVFP4 in groups of 32"),
    "integers": (
        "compressed-tensors NVFP4",
        say(config_groups={"g": {"weights": {"type": "int", "num_bits": 4, "group_size": 128}}}),
        "4-bit int weights in groups of 128",
    ),
    "zero points": (
        "compressed-tensors FP8",
        say(config_groups={"g": {"weights": {"type": "float", "num_bits": 8, "symmetric": False}}}),
        "8-bit float weights with zero points",
    ),
    "sparse weights": (
        "compressed-tensors FP8",
        say(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparse weights .sparse-24-bitmask",
    ),
    "transforms": (
        "compressed-tensors NVFP4",
        say(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        "transforms of weights",
    ),
    "fp4 experts": ("fp8 blocks", say(expert_dtype="fp4"), "experts 'fp4'"),
    "no group": ("compressed-tensors FP8", say(config_groups=None), "lacks 'config_groups'"),
    "broken pattern": ("compressed-tensors FP8", say(ignore=["re:("]), r"module pattern 're:\('"),
    "patterns are no list": ("modelopt NVFP4", say(ignore="lm_head"), "modules 'lm_head'"),
    "block of one number": ("fp8 blocks", say(weight_block_size=[128]), "weight_block_size"),
    "another format": (
        "modelopt NVFP4",
        put("weight", e4m3(256, 64)),
        rf"{PROJECTION}\.weight of type F8_E4M3.*another format",
    ),
    "excluded and packed": (
        "modelopt NVFP4",
        say(ignore=["*self_attn*"]),
        r"self_attn\.\w+\.weight of type U8.*excluded",
    ),
    "nothing is quantized": (
        "modelopt NVFP4",
        lambda stored, _: (stored.clear(), stored.update(ATTENTION)),
        "no weight of the checkpoint is quantized",
    ),
    "scales of an unquantized weight": (
        "modelopt NVFP4",
        put("weight", torch.zeros(256, 64)),
        rf"{PROJECTION}\.\w+scale.*not quantized",
    ),
    "no block scale": (
        "modelopt NVFP4",
        lose("weight_scale"),
        rf"{PROJECTION}\.weight without {PROJECTION}\.weight_scale:",
    ),
    "no global scale": ("modelopt NVFP4", lose("weight_scale_2"), r"without .*weight_scale_2"),
    "no divisor": (
        "compressed-tensors NVFP4",
        lose("weight_global_scale"),
        r"weight_packed without .*weight_global_scale",
    ),
    "no inverse scale": ("fp8 blocks", lose("weight_scale_inv"), r"without .*weight_scale_inv"),
    "scale of the wrong shape": (
        "modelopt NVFP4",
        put("weight_scale", e4m3(256, 8)),
        r"weight_scale of shape \[256, 8\].*\[256, 4\]",
    ),
    "scale per channel where one is due": (
        "modelopt FP8",
        put("weight_scale", torch.ones(256, 1)),
        r"weight_scale of shape \[256, 1\].*scale per tensor",
    ),
    "blocks of another size": (
        "fp8 blocks",
        put("weight_scale_inv", torch.ones(4, 1)),
        r"weight_scale_inv of shape \[4, 1\].*\[2, 1\]",
    ),
    "block scale in float32": (
        "modelopt NVFP4",
        put("weight_scale", torch.ones(256, 4)),
        r"weight_scale of type F32.*F8_E4M3",
    ),
    "global scale per row": (
        "modelopt NVFP4",
        put("weight_scale_2", torch.ones(256)),
        r"weight_scale_2 of shape \[256\].*one number",
    ),
    "scale in integers": (
        "fp8 blocks",
        put("weight_scale_inv", torch.ones(2, 1, dtype=torch.int32)),
        "weight_scale_inv of type I32",
    ),
    "odd size": (
        "modelopt NVFP4",
        put("weight", torch.zeros(256, 28, dtype=torch.uint8)),
        r"\[256, 28\].*multiple of 16",
    ),
    "a vector": (
        "modelopt NVFP4",
        put("weight", torch.zeros(64, dtype=torch.uint8)),
        r"of shape \[64\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_metadata_and_wrong_parts_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    layout, change, message = DAMAGES[damage]
    quantization, make = LAYOUTS[layout]
    quantization = dict(quantization)
    stored, _ = quantize_names(ATTENTION, make, is_projection)
    change(stored, quantization)
    with pytest.raises(CheckpointError, match=message) as caught:
        write_quantized(tmp_path, quantization, stored)
    assert caught.value.remedy


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_global_scale_that_is_no_positive_number_is_refused(tmp_path: Path, value: float) -> None:
    stored, _ = quantize_names(ATTENTION, modelopt_nvfp4, is_projection)
    stored[f"{PROJECTION}.weight_scale_2"] = torch.tensor(value)
    directory = write_quantized(tmp_path, MODELOPT, stored)
    with pytest.raises(CheckpointError, match=r"weight_scale_2 holds .*positive number"):
        directory.tensor(f"{PROJECTION}.weight")


def test_a_block_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    stored, _ = quantize_names(WEIGHTS, modelopt_nvfp4, is_projection)
    stored[f"{PROJECTION}.weight_scale"].view(torch.uint8)[7, 1] = 0x7F
    write_quantized(tmp_path, MODELOPT, stored)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight.*NaN or infinity"):
        load_model(tmp_path)


def test_packed_tensors_without_any_metadata_are_refused(tmp_path: Path) -> None:
    stored, _ = quantize_names(ATTENTION, modelopt_nvfp4, is_projection)
    directory = CheckpointDirectory(write_checkpoint(tmp_path, CONFIG, stored))
    with pytest.raises(CheckpointError, match=r"of type U8.*no quantization_config"):
        directory.tensor(f"{PROJECTION}.weight")


def test_a_truncated_file_of_packed_weights_is_refused(tmp_path: Path) -> None:
    stored, _ = quantize_names(ATTENTION, modelopt_nvfp4, is_projection)
    write_quantized(tmp_path, MODELOPT, stored)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        CheckpointDirectory(tmp_path)


# --- packing ----------------------------------------------------------------------------------


def test_ties_go_to_the_even_code() -> None:
    """With 6 in the block and a global scale of 1, the block scale is 1: codes can be read off."""
    row = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0, -0.25, -0.75, -1.25, -1.75, -2.5]
    row += [-3.5, -5.0]
    half = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    weight = pack(torch.tensor([row]), torch.tensor(1.0))
    assert weight.block_scale.float().tolist() == [[1.0]]
    assert weight.dequantize().tolist() == [half + [-value for value in half]]
    # The even column is in the low nibble; 6 is code 7, 1 is code 2; sign is bit 3.
    assert weight.packed[0, :2].tolist() == [0x07, 0x22]
    assert weight.packed[0, 4:6].tolist() == [0x8F, 0xAA]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_the_nearest_one_that_its_block_can_hold(dtype: torch.dtype) -> None:
    seed = torch.Generator().manual_seed(2)
    weight = (torch.randn(24, 96, generator=seed) * torch.rand(24, 1, generator=seed)).to(dtype)
    packed = pack(weight)
    scales = packed.block_scale.double().numpy().repeat(16, axis=-1) * packed.global_scale.item()
    choices = E2M1 * scales[..., None]
    error = np.abs(choices - weight.double().numpy()[..., None])
    ours = np.abs(packed.dequantize().double().numpy() - weight.double().numpy())
    assert (ours <= error.min(-1) + 2**-23 * np.abs(choices).max()).all()
    # No block saturates: its largest element meets the largest code to within a scale's rounding.
    assert ours.max() < weight.abs().max().item() / 6


def test_the_global_scale_uses_the_whole_range_of_block_scales() -> None:
    weights = [torch.tensor([[1.0] * 16, [-5.376] * 16]), torch.ones(1, 16)]
    scale = global_scale_of(weights)
    assert scale.item() == pytest.approx(5.376 / (6 * 448), rel=1e-6)
    assert pack(weights[0], scale).block_scale[1, 0].float().item() == 448


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(2, 32)
    weight[0, 0] = 3.0
    assert torch.equal(pack(weight).dequantize(), weight)
    assert torch.equal(pack(torch.zeros(2, 32)).dequantize(), torch.zeros(2, 32))


def test_packing_what_was_unpacked_changes_nothing(tmp_path: Path) -> None:
    seed = torch.Generator().manual_seed(3)
    first = pack(torch.randn(3, 16, 64, generator=seed))
    again = pack(first.dequantize(), first.global_scale)
    assert torch.equal(again.dequantize(), first.dequantize())
    save_file({"x": first.packed}, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], first.packed)
