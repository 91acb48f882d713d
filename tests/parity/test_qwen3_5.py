"""Target modules and their states against ``transformers``, on random weights in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from state_harness import ROWS, Harness
from tiny_model import hf_config, random_weights, split_experts, write_checkpoint

from tllm_wmtp.checkpoint.loader import LoadedModel, load_model

transformers = pytest.importorskip("transformers")

TOLERANCE = {"atol": 1e-5, "rtol": 0}


def reference(config: dict, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The same weights in ``transformers``; loading is strict, so the names are checked too."""
    moe = "num_experts" in config
    config_class = transformers.Qwen3_5MoeTextConfig if moe else transformers.Qwen3_5TextConfig
    model_class = transformers.Qwen3_5MoeForCausalLM if moe else transformers.Qwen3_5ForCausalLM
    fields = {key: value for key, value in config.items() if key != "model_type"}
    model = model_class(config_class(**fields)).eval()
    target = {name: w for name, w in weights.items() if not name.startswith("mtp.")}
    if config["tie_word_embeddings"]:
        target["lm_head.weight"] = target["model.embed_tokens.weight"]
    model.load_state_dict(target, strict=True)
    return model


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def under_language_model(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


LAYOUTS = {
    "moe tied fused": ({}, {}),
    "moe untied split": ({"tied": False}, {"split": True}),
    "moe sharded, multimodal names": ({}, {"shards": 3, "rename": under_language_model}),
    "moe all attention early": (
        {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
        {},
    ),
    "dense tied": ({"moe": False}, {}),
    "dense untied sharded": ({"moe": False, "tied": False}, {"shards": 2}),
    "dense equal heads": (
        {"moe": False, "linear_num_key_heads": 4, "num_key_value_heads": 4},
        {"rename": under_language_model},
    ),
    "many experts": ({"num_experts": 20, "num_experts_per_tok": 3}, {"split": True}),
    "yarn": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {},
    ),
}


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LoadedModel, torch.nn.Module]:
    changes, layout = LAYOUTS[request.param]
    layout = dict(layout)
    if "layer_types" in changes:
        changes = changes | {"num_hidden_layers": len(changes["layer_types"])}
    config = hf_config(**changes)
    weights = random_weights(config, seed=3)
    oracle = reference(config, weights)
    stored = split_experts(weights) if layout.pop("split", False) else weights
    return load_model(write_checkpoint(tmp_path, config, stored, **layout), with_head=True), oracle


def tokens_of(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]


def test_prefill_verify_and_partial_commits_equal_transformers(
    pair: tuple[LoadedModel, torch.nn.Module],
) -> None:
    model, oracle = pair
    prompts = tokens_of(1, 83, 20)
    ours = Harness(model, prompts)
    for index, logits in enumerate(ours.prefill(chunk=32)):
        torch.testing.assert_close(logits, reference_logits(oracle, prompts[index]), **TOLERANCE)
    for seed, counts in enumerate(([7, 3], [1, 7], [0, 5], [4, 2])):
        rows = tokens_of(10 + seed, ROWS, ROWS)
        logits = ours.verify(rows)
        for index in range(2):
            whole = reference_logits(oracle, ours.sequences[index] + rows[index])
            torch.testing.assert_close(logits[index], whole[-ROWS:], **TOLERANCE)
        ours.commit(rows, counts)


@pytest.mark.parametrize("count", range(ROWS + 1))
def test_states_after_a_partial_commit_equal_those_of_a_fresh_prefill(
    tmp_path: Path, count: int
) -> None:
    config = hf_config()
    model = load_model(write_checkpoint(tmp_path, config, random_weights(config, 5)))
    prompt, rows = tokens_of(2, 45, ROWS)
    speculative = Harness(model, [prompt])
    speculative.prefill(chunk=64)
    before = speculative.recurrent_states(0)
    speculative.verify([rows])
    for kept, now in zip(before, speculative.recurrent_states(0), strict=True):
        assert torch.equal(kept, now)  # a verify advances nothing
    speculative.commit([rows], [count])
    fresh = Harness(model, [prompt + rows[:count]])
    fresh.prefill(chunk=64)
    for ours, oracle in zip(
        speculative.recurrent_states(0), fresh.recurrent_states(0), strict=True
    ):
        torch.testing.assert_close(ours, oracle, **TOLERANCE)


def test_prefill_does_not_depend_on_the_chunk(tmp_path: Path) -> None:
    config = hf_config()
    model = load_model(write_checkpoint(tmp_path, config, random_weights(config, 6)))
    prompt = tokens_of(3, 150)
    whole = Harness(model, prompt).prefill(chunk=1000)[0]
    for chunk in (1, 3, 64, 65):
        torch.testing.assert_close(Harness(model, prompt).prefill(chunk)[0], whole, **TOLERANCE)


def test_a_neighbour_changes_nothing(tmp_path: Path) -> None:
    config = hf_config()
    model = load_model(write_checkpoint(tmp_path, config, random_weights(config, 7)))
    first, second = tokens_of(4, 30, 70)
    rows = tokens_of(5, ROWS, ROWS)
    together, alone = Harness(model, [first, second]), Harness(model, [second])
    together.prefill(32)
    alone.prefill(32)
    torch.testing.assert_close(together.verify(rows)[1], alone.verify(rows[1:])[0], **TOLERANCE)
    together.commit(rows, [2, 6])
    alone.commit(rows[1:], [6])
    for ours, oracle in zip(together.recurrent_states(1), alone.recurrent_states(0), strict=True):
        torch.testing.assert_close(ours, oracle, **TOLERANCE)
