"""Observed activations against those of ``transformers``' modules, hook by hook, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_model import hf_config, random_prompts, random_weights, write_checkpoint

from tllm_wmtp.checkpoint.calibration import observe
from tllm_wmtp.checkpoint.loader import load_model

transformers = pytest.importorskip("transformers")

SEQUENCES = random_prompts([40, 17, 33], 97)


def amax_by_transformers(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """Largest input of every linear layer, and of the two products of the routed experts."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    model = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**fields)).eval()
    target = {name: w for name, w in weights.items() if not name.startswith("mtp.")}
    target["lm_head.weight"] = target["model.embed_tokens.weight"]
    model.load_state_dict(target)
    largest: dict[str, float] = {}

    def note(name: str, x: torch.Tensor) -> None:
        largest[name] = max(largest.get(name, 0.0), x.abs().max().item())

    def experts_hook(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...]) -> None:
            hidden, chosen = inputs[0], inputs[1]
            note(f"{name}:rise", hidden)
            for row, experts in zip(hidden, chosen, strict=True):
                for expert in experts.tolist():
                    gate, up = F.linear(row, module.gate_up_proj[expert]).chunk(2)
                    note(f"{name}:down", F.silu(gate) * up)

        return hook

    for name, module in model.named_modules():
        ours = name.removeprefix("model.")
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(experts_hook(ours.removesuffix(".experts")))
        elif isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, ours=ours: note(ours, inputs[0]),
            )
    with torch.inference_mode():
        for sequence in SEQUENCES:
            model.model(torch.tensor([sequence]))
    return largest


def test_observed_activations_are_those_of_transformers(tmp_path: Path) -> None:
    config = hf_config()
    weights = random_weights(config)
    model = load_model(write_checkpoint(tmp_path, config, weights), with_head=True)
    seen = []
    found = observe(model, SEQUENCES, lambda: seen.append(1))
    assert len(seen) == len(SEQUENCES)
    expected = amax_by_transformers(config, weights)
    kept = ("gate", "lm_head")  # routers are no linear layers there; lm_head was not run
    ours = {
        key.removeprefix("target:"): value
        for key, value in found.items()
        if key.startswith("target:") and not key.endswith(kept)
    }
    theirs = {key: value for key, value in expected.items() if not key.endswith(kept)}
    assert ours.keys() == theirs.keys()
    assert len(ours) > 20
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=1e-4), key
    head = {key for key in found if key.startswith("head:")}
    assert {"head:fc", "head:layers.0.self_attn.o_proj", "head:layers.0.mlp:down"} <= head


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    config = hf_config()
    model = load_model(write_checkpoint(tmp_path, config, random_weights(config)), with_head=True)
    before = {name: set(vars(module)) for name, module in model.target.named_modules()}
    observe(model, SEQUENCES[:1])
    assert {name: set(vars(module)) for name, module in model.target.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in model.target.modules())
