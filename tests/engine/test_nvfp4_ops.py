"""NVFP4 in a graph, in onnxruntime, against quantization done by the book."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lockstep
import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_draft_graph import demo_prompts
from torch import nn

from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.checkpoint.quantization.packing import global_scale_of, pack
from tllm_wmtp.checkpoint.quantization.weights import NvFp4Weight
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.demo import CHECKPOINT
from tllm_wmtp.engine.draft import DraftSpec, write_draft_graph
from tllm_wmtp.engine.graph import Graph
from tllm_wmtp.engine.nvfp4 import gathered_experts, nvfp4_linear_standard, rounded_rows
from tllm_wmtp.engine.weights import open_model
from tllm_wmtp.ring import RingSpec


def run(g: Graph, **feed: np.ndarray) -> Any:
    session = onnxruntime.InferenceSession(
        g.model().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feed)


def by_the_book(x: torch.Tensor, input_scale: float) -> torch.Tensor:
    """Each value's nearest FP4 number under its block's fp8 scale, one value at a time."""
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    out = torch.empty_like(x)
    for i, row in enumerate(x.tolist()):
        for begin in range(0, len(row), 16):
            block = row[begin : begin + 16]
            scale = max(abs(value) for value in block) / 6 / input_scale
            scale = float(torch.tensor(min(scale, 448.0)).to(torch.float8_e4m3fn)) * input_scale
            for j, value in enumerate(block):
                size = min(abs(value) / scale, 6.0) if scale else 0.0
                code = min(range(8), key=lambda c: (abs(grid[c] - size), c % 2))
                out[i, begin + j] = (grid[code] if value >= 0 else -grid[code]) * scale
    return out


def test_activations_round_to_the_nearest_fp4_number() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator) * torch.tensor([[1.0], [100.0], [1e-3], [0], [5.0]])
    x[4, :16] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2)  # ties, if scale is 1
    g = Graph("rounding")
    rows = g.input("x", "float32", ["n", 64])
    g.output(rounded_rows(g, rows, 0.0125), "y", ["n", 64])
    (found,) = run(g, x=x.numpy())
    torch.testing.assert_close(torch.from_numpy(found), by_the_book(x, 0.0125), rtol=1e-6, atol=0)


def test_linear_layer_multiplies_rounded_rows_with_dequantized_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 32, generator=generator), torch.randn(8, 32, generator=generator)
    made = pack(weight, input_scale=torch.tensor(0.002))
    g = Graph("linear")
    out = nvfp4_linear_standard(g, g.input("x", "float32", ["n", 32]), made, "w")
    g.output(out, "y", ["n", 8])
    expected = by_the_book(x, 0.002).double() @ made.dequantize().double().t()
    (found,) = run(g, x=x.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared_scale", [True, False])
def test_gathered_experts_unpack_every_byte(shared_scale: bool) -> None:
    """All 256 bytes in all four places of a word, the sign bit of the word among them."""
    generator = torch.Generator().manual_seed(2)
    packed = torch.stack([torch.randperm(256, generator=generator) for _ in range(4 * 8)]).to(
        torch.uint8
    )
    packed = packed.view(4, 8, 256)  # [E, out, in / 2]
    scales = torch.rand(4, 8, 32, generator=generator).mul(3).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.37) if shared_scale else torch.rand(4, 1, 1, generator=generator)
    weight = NvFp4Weight(packed, scales, whole)
    g = Graph("experts")
    experts = g.input("experts", "int64", ["k"])
    g.output(gathered_experts(g, weight, experts, "w"), "y", ["k", 8, 512])
    chosen = np.array([3, 0, 0, 2])
    (found,) = run(g, experts=chosen)
    np.testing.assert_allclose(found, weight.dequantize()[chosen], rtol=1e-6)


class _RoundedInput:
    """A forward hook: what a quantized layer sees of its input."""

    def __init__(self, input_scale: float):
        self.input_scale = input_scale

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = inputs
        blocks = x.flatten(0, -2)
        return pack_rows(blocks, self.input_scale).view(x.shape)


def pack_rows(x: torch.Tensor, input_scale: float) -> torch.Tensor:
    return pack(x.contiguous(), torch.tensor(input_scale)).dequantize()


def test_nvfp4_head_drafts_what_the_runtime_does_with_rounded_inputs(
    nvfp4_demo: Path, tmp_path: Path
) -> None:
    """The runtime computes with dequantized weights; with the inputs of the quantized layers
    rounded by hooks it computes what the engine does. Routed experts take their rows unrounded."""
    speculation = MtpConfig(depth=5, window=48, n_sink=4)
    model = load_model(nvfp4_demo, with_head=True)
    source = open_model(nvfp4_demo)
    hooked = 0
    for path, module in model.head.named_modules():
        found = source.head_weights.quantized(f"{path}.weight")
        if isinstance(module, nn.Linear) and found is not None:
            module.register_forward_pre_hook(_RoundedInput(float(found.input_scale)))
            hooked += 1
    assert hooked == 8
    graph = lockstep.graph_of(nvfp4_demo, tmp_path, speculation, 4, quantized=True)
    record = lockstep.run(model, graph, speculation, demo_prompts(4), 50)
    assert record.steps > 60
    assert record.differing <= 0.03 * record.steps


def test_nvfp4_head_drafts_nearly_what_the_unquantized_one_does(
    nvfp4_demo: Path, tmp_path: Path
) -> None:
    speculation = MtpConfig(depth=5, window=48, n_sink=4)
    model = load_model(CHECKPOINT, with_head=True)
    graph = lockstep.graph_of(nvfp4_demo, tmp_path, speculation, 4, quantized=True)
    record = lockstep.run(model, graph, speculation, demo_prompts(4), 50)
    assert 0 < record.differing < 0.6 * record.steps


def test_dequantized_weights_draft_what_the_runtime_does(nvfp4_demo: Path, tmp_path: Path) -> None:
    speculation = MtpConfig(depth=5, window=48, n_sink=4)
    model = load_model(nvfp4_demo, with_head=True)
    graph = lockstep.graph_of(nvfp4_demo, tmp_path, speculation, 4, quantized=False)
    record = lockstep.run(model, graph, speculation, demo_prompts(4), 30)
    assert record.steps > 30
    assert record.differing == 0


def test_one_unquantized_expert_leaves_its_whole_stack_dequantized(
    nvfp4_demo: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(nvfp4_demo, mixed)
    weights = load_file(mixed / "model.safetensors")
    module = "mtp.layers.0.mlp.experts.3.up_proj"
    plain = open_model(nvfp4_demo).head_weights.tensor(f"{module.removeprefix('mtp.')}.weight")
    for part in ("weight_scale", "weight_scale_2", "input_scale"):
        del weights[f"{module}.{part}"]
    save_file(weights | {f"{module}.weight": plain}, mixed / "model.safetensors")
    spec = DraftSpec(RingSpec.for_chain(4, 48, 5), 2, 16, quantized=True)
    quantized = {}
    for name, checkpoint in (("all", nvfp4_demo), ("mixed", mixed)):
        (tmp_path / name / "graph").mkdir(parents=True)
        written = write_draft_graph(open_model(checkpoint), spec, tmp_path / name / "graph")
        quantized[name] = set(written.quantized_weights)
    assert quantized["all"] - quantized["mixed"] == {"layers.0.mlp.gate_up"}


def test_experts_of_one_scale_each_keep_their_values(tmp_path: Path) -> None:
    """gate and up of an expert kept apart with scales of their own make one stack."""
    from tllm_wmtp.engine.emit import stack_experts

    generator = torch.Generator().manual_seed(4)
    parts = [[torch.randn(8, 32, generator=generator) * s for s in (1.0, 3.0)] for _ in range(3)]
    rows = [[pack(part, global_scale_of([part])) for part in row] for row in parts]
    stacked = stack_experts(rows)
    expected = torch.stack([torch.cat([one.dequantize() for one in row]) for row in rows])
    torch.testing.assert_close(stacked.dequantize(), expected, rtol=1e-6, atol=1e-7)
