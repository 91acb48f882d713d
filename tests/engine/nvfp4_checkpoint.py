"""An NVFP4 copy of a checkpoint, in the layout of NVIDIA Model Optimizer's exporter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_model import split_experts

from tllm_wmtp.checkpoint.quantization.packing import global_scale_of, pack

LEFT_ALONE = ("lm_head", "embed_tokens", "conv1d", "in_proj_a", "in_proj_b", "mlp.gate", "norm")
LEFT_ALONE = (*LEFT_ALONE, "shared_expert_gate")
#: Projections of one input, which share a global scale.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Largest activation that the input scales allow for.
LARGEST_ACTIVATION = 12.0


def quantized_copy(source: Path, target: Path) -> Path:
    """Every matrix but those that exporters leave alone, experts one by one."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            shutil.copy(file, target)
    weights = split_experts(load_file(source / "model.safetensors"))
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or tensor.shape[1] % 16 or module.endswith(LEFT_ALONE):
            stored[name] = tensor.contiguous().clone()
            continue
        parent, _, leaf = module.rpartition(".")
        group = next((one for one in TOGETHER if leaf in one), (leaf,))
        names = [f"{parent}.{one}.weight" for one in group]
        shared = global_scale_of([weights[name].float() for name in names if name in weights])
        made = pack(tensor.float(), shared)
        stored[name] = made.packed.contiguous()
        stored[f"{module}.weight_scale"] = made.block_scale.contiguous()
        stored[f"{module}.weight_scale_2"] = shared.reshape(()).clone()
        stored[f"{module}.input_scale"] = torch.tensor(LARGEST_ACTIVATION / (6 * 448))
    save_file(stored, target / "model.safetensors")
    excluded = [f"*{name}" for name in LEFT_ALONE]
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": excluded}
    text = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (target / "hf_quant_config.json").write_text(json.dumps(text))
    return target
