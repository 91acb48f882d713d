"""MiMo, GLM-4.5 and DeepSeek-V3: targets against ``transformers``, heads against float64."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from head_reference import HeadReference, handed_over, visible
from state_harness import ROWS, Harness
from tiny_families import (
    EXPERTS,
    YARN,
    family_config,
    is_head,
    load_reference,
    random_weights,
)
from tiny_model import random_prompts, write_checkpoint

from tllm_wmtp.checkpoint.loader import LoadedModel, load_model, read_config
from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.causal import CausalStates

TOLERANCE = {"atol": 1e-5, "rtol": 0}
SCALED = {"atol": 1e-5, "rtol": 1e-5}  # hidden states before a norm reach 10
GLM_LIKE = {"num_key_value_heads": 4, "use_qk_norm": False, "attention_bias": False}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mimo": ("mimo", {}, {}),
    "mimo tied, sharded": ("mimo", {"tie_word_embeddings": True}, {"shards": 3}),
    "glm4_moe": ("glm4_moe", {}, {}),
    "glm4_moe as Air, fused experts": ("glm4_moe", GLM_LIKE, {"fused": True}),
    "glm4_moe many experts in one group": (
        "glm4_moe",
        EXPERTS | {"n_routed_experts": 20, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1},
        {},
    ),
    "deepseek_v3": ("deepseek_v3", {}, {}),
    "deepseek_v3 queries at once, all dense but the last": (
        "deepseek_v3",
        {"q_lora_rank": None, "first_k_dense_replace": 2, "norm_topk_prob": False},
        {"fused": True, "shards": 2},
    ),
    "deepseek_v3 heads of published size": (
        "deepseek_v3",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        {},
    ),
    "deepseek_v3 yarn, halves": ("deepseek_v3", YARN | {"rope_interleave": False}, {}),
    "deepseek_v3 yarn, pairs": ("deepseek_v3", YARN, {}),
}


class Pair:
    """Our model and the oracles, from one checkpoint."""

    def __init__(self, path: Path, layout: str):
        family, changes, stored = LAYOUTS[layout]
        stored = dict(stored)
        self.config = family_config(family, **changes)
        weights = random_weights(self.config, seed=3)
        written = random_weights(self.config, seed=3, fused=stored.pop("fused", False))
        self.model: LoadedModel = load_model(
            write_checkpoint(path, self.config, written, **stored), with_head=True
        )
        self.oracle = load_reference(self.config, weights)
        self.head = HeadReference(self.config, weights, self.oracle.model.rotary_emb)

    @torch.inference_mode()
    def oracle_logits(self, tokens: list[int]) -> torch.Tensor:
        return self.oracle(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(
    scope="module", params=LAYOUTS, ids=lambda name: name.replace(", ", "-").replace(" ", "-")
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("checkpoint"), request.param)


def test_prefill_verify_and_partial_commits_equal_transformers(pair: Pair) -> None:
    prompts = random_prompts([83, 20], 97, seed=1)
    ours = Harness(pair.model, prompts)
    for index, logits in enumerate(ours.prefill(chunk=32)):
        torch.testing.assert_close(logits, pair.oracle_logits(prompts[index]), **TOLERANCE)
    for seed, counts in enumerate(([7, 3], [0, 5])):
        rows = random_prompts([ROWS, ROWS], 97, seed=10 + seed)
        logits = ours.verify(rows)
        for index in range(2):
            whole = pair.oracle_logits(ours.sequences[index] + rows[index])
            torch.testing.assert_close(logits[index], whole[-ROWS:], **TOLERANCE)
        ours.commit(rows, counts)


@torch.inference_mode()
def test_the_head_equals_its_description_and_feeds_itself(pair: Pair) -> None:
    """Every row of a prompt, then three rows whose hidden state is the head's own output."""
    target, head = pair.model.target, pair.model.head
    assert head is not None
    tokens = random_prompts([30], 97, seed=2)[0]
    scale = target.config.caches.attention.scale
    positions = torch.arange(len(tokens) - 1)[None]
    hidden = target(torch.tensor([tokens[:-1]]), positions, CausalStates(scale=scale))
    expected = handed_over(copy.deepcopy(pair.oracle).double(), pair.config, tokens[:-1])
    torch.testing.assert_close(hidden[0].double(), expected, **SCALED)
    following = tokens[1:]
    for _ in range(4):
        rows = len(following)
        ids, positions = torch.tensor([following]), torch.arange(rows)[None]
        attend = CausalStates(scale=target.config.caches.draft.scale)
        output = head(head.embed(target, ids), hidden, positions, attend)
        oracle = pair.head.outputs(pair.head.embed(ids[0]), expected, visible(rows, None))
        torch.testing.assert_close(output[0].double(), oracle, **TOLERANCE)
        logits = pair.head.logits(oracle)
        torch.testing.assert_close(head.logits(target, output)[0].double(), logits, **TOLERANCE)
        hidden = torch.cat((hidden, output[:, -1:]), 1)
        expected = torch.cat((expected, oracle[-1:]))
        following = [*following, int(logits[-1].argmax())]


@torch.inference_mode()
def test_rows_left_out_of_the_last_layer_change_nothing(pair: Pair) -> None:
    target = pair.model.target
    assert target.prunable
    ids = torch.tensor(random_prompts([24], 97, seed=4))
    positions, rows = torch.arange(24)[None], torch.tensor([2, 3, 23])
    attention = target.config.caches.attention
    whole = target(ids, positions, CausalStates(scale=attention.scale))

    class LastLayerAnswersSome(CausalStates):
        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if q.shape[1] == k.shape[1]:
                return super().__call__(q, k, v)
            every = q.new_zeros(*k.shape[:2], *q.shape[2:]).index_copy(1, rows, q)
            return super().__call__(every, k, v)[:, rows]

    some = target(ids, positions, LastLayerAnswersSome(scale=attention.scale), rows)
    torch.testing.assert_close(some, whole[:, rows], **SCALED)


def test_a_head_without_embedding_and_projection_uses_the_targets(tmp_path: Path) -> None:
    config = family_config("glm4_moe")
    weights = random_weights(config, seed=5)
    for name in ("embed_tokens", "shared_head.head"):
        del weights[f"model.layers.3.{name}.weight"]
    model = load_model(write_checkpoint(tmp_path, config, weights), with_head=True)
    assert model.head is not None
    ids, output = torch.arange(5), torch.randn(2, 64)
    assert torch.equal(model.head.embed(model.target, ids), model.target.embed_tokens(ids))
    assert torch.equal(model.head.logits(model.target, output), model.target.lm_head(output))
    assert model.head.get_parameter("embed_tokens.weight") is model.target.embed_tokens.weight


def test_a_heads_copy_of_the_targets_embedding_is_kept_once(tmp_path: Path) -> None:
    config = family_config("deepseek_v3")
    weights = random_weights(config, seed=6)
    weights["model.layers.3.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    model = load_model(write_checkpoint(tmp_path, config, weights), with_head=True)
    assert model.head is not None
    own = model.head.get_parameter
    assert own("embed_tokens.weight") is model.target.embed_tokens.weight
    assert own("shared_head.head.weight") is not model.target.lm_head.weight  # differs here
    assert torch.equal(
        own("shared_head.head.weight"), weights["model.layers.3.shared_head.head.weight"]
    )


HEADS = {
    "mimo": "model.mtp_layers.0.*",
    "glm4_moe": "model.layers.3.*",
    "deepseek_v3": "model.layers.3.*",
}


@pytest.mark.parametrize("family", HEADS)
def test_speculation_without_a_head_is_refused_by_the_familys_names(
    tmp_path: Path, family: str
) -> None:
    config = family_config(family)
    weights = random_weights(config)
    target = {name: tensor for name, tensor in weights.items() if not is_head(config, name)}
    path = write_checkpoint(tmp_path, config, target)
    with pytest.raises(CheckpointError, match=re.escape(f"has no {HEADS[family]}")) as error:
        load_model(path, with_head=True)
    assert "speculation=None" in error.value.remedy
    assert load_model(path).head is None


@pytest.mark.parametrize(
    ("family", "leaf"),
    [
        ("mimo", "model.mtp_layers.0.input_proj.weight"),
        ("mimo", "model.mtp_layers.0.self_attn.v_proj.bias"),
        ("glm4_moe", "model.layers.3.shared_head.norm.weight"),
        ("glm4_moe", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("deepseek_v3", "model.layers.3.self_attn.kv_b_proj.weight"),
        ("deepseek_v3", "model.layers.3.mlp.experts.7.up_proj.weight"),
    ],
)
def test_one_missing_weight_of_a_head_is_refused_and_the_target_still_loads(
    tmp_path: Path, family: str, leaf: str
) -> None:
    config = family_config(family)
    weights = random_weights(config)
    del weights[leaf]
    path = write_checkpoint(tmp_path, config, weights)
    with pytest.raises(CheckpointError, match="lacks"):
        load_model(path, with_head=True)
    assert load_model(path).head is None


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("heads", [0, 2])
def test_more_or_fewer_heads_than_one_are_refused(tmp_path: Path, family: str, heads: int) -> None:
    config = family_config(family, num_nextn_predict_layers=heads)
    weights = random_weights(config)
    if heads == 2:
        more = {"model.layers.3.": "model.layers.4.", "model.mtp_layers.0.": "model.mtp_layers.1."}
        for name in [name for name in weights if is_head(config, name)]:
            for first, second in more.items():
                if name.startswith(first):
                    weights[name.replace(first, second)] = weights[name]
    path = write_checkpoint(tmp_path, config, weights)
    with pytest.raises(CheckpointError, match=f"num_nextn_predict_layers {heads}: .*one MTP head"):
        load_model(path, with_head=True)
    assert load_model(path).head is None


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mimo", {"use_sliding_window": True}, "full attention"),
        ("mimo", {"hidden_act": "gelu"}, "'silu'"),
        ("mimo", {"num_key_value_heads": 3}, "must divide num_attention_heads 4"),
        ("glm4_moe", {"head_dim": 20}, "multiple of 8"),
        ("glm4_moe", {"n_group": 3}, "divide n_routed_experts 8"),
        ("glm4_moe", {"topk_group": 5}, "there are 4 groups"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "there are 4 experts"),
        ("glm4_moe", {"n_group": 8, "topk_group": 8}, "two experts or more"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "must be 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "'noaux_tc'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "must have experts"),
        ("deepseek_v3", {"kv_lora_rank": 33}, "multiple of 8"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'yarn'"),
    ],
)
def test_a_config_that_we_would_compute_wrongly_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(
            write_checkpoint(tmp_path, family_config(family, **changes), {"x": torch.ones(1)})
        )


def test_the_routers_bias_stays_in_float32(tmp_path: Path) -> None:
    config = family_config("deepseek_v3")
    weights = random_weights(config, seed=7)
    path = write_checkpoint(tmp_path, config, weights)
    model = load_model(path, dtype=torch.bfloat16)
    name = "layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(model.target.get_parameter(name), weights[f"model.{name}"])
    assert model.target.lm_head.weight.dtype == torch.bfloat16


def test_a_checkpoint_in_blocks_of_fp8_is_its_own_values_unpacked(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: projections in FP8, a scale for every 128 x 128 of them."""
    config = family_config("deepseek_v3", intermediate_size=200)
    packed, plain = {}, {}
    for name, weight in random_weights(config, seed=8).items():
        packed[name] = plain[name] = weight
        if "_proj" not in name or "eh_proj" in name:
            continue
        scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        values, plain[name] = torch.empty_like(weight), torch.empty_like(weight)
        for row, column in itertools.product(*map(range, scales.shape)):
            block = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scales[row, column] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn).float()
            plain[name][block] = values[block] * scales[row, column]
        packed[name], packed[f"{name}_scale_inv"] = values.to(torch.float8_e4m3fn), scales
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    quantized = config | {"quantization_config": scheme | {"activation_scheme": "dynamic"}}
    ours = load_model(write_checkpoint(tmp_path / "packed", quantized, packed), with_head=True)
    oracle = load_model(write_checkpoint(tmp_path / "plain", config, plain), with_head=True)
    for module, expected in ((ours.target, oracle.target), (ours.head, oracle.head)):
        assert module is not None
        assert expected is not None
        for (name, parameter), other in zip(
            module.named_parameters(), expected.parameters(), strict=True
        ):
            assert torch.equal(parameter, other), name
