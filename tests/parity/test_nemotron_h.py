"""Nemotron-H against ``transformers`` on random weights in float32, and its rule in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from state_harness import ROWS, Harness
from tiny_model import Weights, write_checkpoint
from tiny_nemotron import fuse_experts, hf_config, random_weights, tiny_checkpoint, under_model

from tllm_wmtp.checkpoint.loader import LoadedModel, load_model, read_config
from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.causal import CausalStates
from tllm_wmtp.models.layers.mamba2 import chunked_ssd, ssd_commit, ssd_rows

transformers = pytest.importorskip("transformers")

TOLERANCE = {"atol": 2e-5, "rtol": 0}  # squared ReLU widens what float32 loses


def reference(config: dict[str, Any], weights: Weights) -> torch.nn.Module:
    """The same weights in ``transformers``; loading is strict, so the names are checked too.

    Its Mamba layers take the lower bound of dt from ``time_step_min`` in a forward of many rows and
    none in a forward of one; ``time_step_limit`` is what the published models mean.
    """
    fields = {key: value for key, value in config.items() if key != "model_type"}
    model = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**fields)).eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            low, high = config.get("time_step_limit", [0.0, None])
            module.time_step_limit = (low, math.inf if high is None else high)
    target = {
        under_model(name): tensor
        for name, tensor in fuse_experts(weights).items()
        if not name.startswith("mtp.")
    }
    model.load_state_dict(target, strict=True)
    return model


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "attention before the last moe": ({}, {}),
    "attention at the end, fused, model prefix": (
        {"pattern": "MEM*"},
        {"fused": True, "rename": under_model},
    ),
    "attention in the middle, mamba at the end, mlp": (
        {"pattern": "M-M*-M", "n_groups": 4, "num_key_value_heads": 4},
        {"shards": 2},
    ),
    "two attention layers, expert groups, latent experts": (
        {
            "pattern": "*M*EE",
            "n_groups": 1,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_latent_size": 40,
        },
        {},
    ),
    "many experts, weights as they are, dt bounded": (
        {
            "pattern": "EM*ME",
            "n_routed_experts": 20,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "time_step_limit": [0.3, 0.9],
        },
        {"fused": True},
    ),
    "biases": ({"use_bias": True, "mlp_bias": True, "pattern": "M-*E"}, {}),
    "no convolution bias": ({"use_conv_bias": False}, {}),
}


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LoadedModel, torch.nn.Module]:
    changes, layout = LAYOUTS[request.param]
    layout = dict(layout)
    config = hf_config(**changes)
    weights = random_weights(config, seed=3)
    stored = fuse_experts(weights) if layout.pop("fused", False) else weights
    ours = load_model(write_checkpoint(tmp_path, config, stored, **layout), with_head=True)
    return ours, reference(config, weights)


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
    for seed, counts in enumerate(([7, 3], [1, 6], [0, 5], [4, 2])):
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
    model = load_model(tiny_checkpoint(tmp_path, seed=5))
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
        torch.testing.assert_close(ours, oracle, atol=1e-5, rtol=1e-5)


def test_prefill_does_not_depend_on_the_chunk(tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path, seed=6))
    prompt = tokens_of(3, 150)
    whole = Harness(model, prompt).prefill(chunk=1000)[0]
    for chunk in (1, 3, 64, 65):
        torch.testing.assert_close(Harness(model, prompt).prefill(chunk)[0], whole, **TOLERANCE)


@pytest.mark.parametrize(
    ("pattern", "prunable"), [("MEM*E", True), ("M*-E", True), ("*M", False), ("*ME", False)]
)
@torch.inference_mode()
def test_rows_that_are_read_do_not_depend_on_those_left_out(
    tmp_path: Path, pattern: str, prunable: bool
) -> None:
    target = load_model(tiny_checkpoint(tmp_path, seed=8, pattern=pattern)).target
    assert target.prunable is prunable
    ids, rows = torch.tensor(tokens_of(4, 30, 30)), torch.tensor([2, 17, 29])
    positions = torch.arange(30).expand(2, -1)

    class Chosen(CausalStates):
        """Attention of some rows: the plain one of all rows, and then these of it."""

        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if q.shape[1] == k.shape[1]:
                return super().__call__(q, k, v)
            every = torch.zeros(*k.shape[:2], *q.shape[2:]).index_copy(1, rows, q)
            return super().__call__(every, k, v).index_select(1, rows)

    whole = target(ids, positions, Chosen(4)).index_select(1, rows)
    torch.testing.assert_close(target(ids, positions, Chosen(4), rows), whole, **TOLERANCE)


def head_in_float64(
    weights: Weights, config: dict[str, Any], embedding: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """The head written down row by row from its public description."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    eps = config["layer_norm_epsilon"]

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[name]

    fused = torch.cat(
        (rms(embedding, "mtp.layers.0.enorm.weight"), rms(hidden, "mtp.layers.0.hnorm.weight")), -1
    )
    x = fused @ w["mtp.layers.0.eh_proj.weight"].T
    y = rms(x, "mtp.layers.0.norm.weight")
    heads, width = config["num_attention_heads"], config["head_dim"]
    share = heads // config["num_key_value_heads"]
    q, k, v = (y @ w[f"mtp.layers.0.mixer.{n}_proj.weight"].T for n in "qkv")
    out = torch.zeros(x.shape[0], heads * width, dtype=torch.float64)
    for head in range(heads):
        mine, theirs = (slice(i * width, (i + 1) * width) for i in (head, head // share))
        for row in range(x.shape[0]):
            scores = k[: row + 1, theirs] @ q[row, mine] / width**0.5
            out[row, mine] = scores.softmax(0) @ v[: row + 1, theirs]
    x = x + out @ w["mtp.layers.0.mixer.o_proj.weight"].T

    def mlp(y: torch.Tensor, name: str) -> torch.Tensor:
        up = y @ w[f"mtp.layers.1.mixer.{name}.up_proj.weight"].T
        return up.clamp(min=0) ** 2 @ w[f"mtp.layers.1.mixer.{name}.down_proj.weight"].T

    y = rms(x, "mtp.layers.1.norm.weight")
    mixed = mlp(y, "shared_experts")
    for row in range(x.shape[0]):
        scores = 1 / (1 + (-(w["mtp.layers.1.mixer.gate.weight"] @ y[row])).exp())
        choice = scores + w["mtp.layers.1.mixer.gate.e_score_correction_bias"]
        chosen = choice.argsort(descending=True)[: config["num_experts_per_tok"]].tolist()
        total = sum(scores[e] for e in chosen)
        for e in chosen:
            share_of = config["routed_scaling_factor"] * scores[e] / total
            mixed[row] += share_of * mlp(y[row], f"experts.{e}")
    x = x + mixed
    x = x - x.mean(-1, keepdim=True)  # unlike the other norms
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x * w["mtp.layers.1.final_layernorm.weight"]


@torch.inference_mode()
def test_the_head_equals_its_description_in_float64(tmp_path: Path) -> None:
    config = hf_config()
    weights = random_weights(config, seed=9)
    model = load_model(write_checkpoint(tmp_path, config, weights), with_head=True)
    assert model.head is not None
    generator = torch.Generator().manual_seed(1)
    embedding, hidden = torch.randn(2, 12, 64, generator=generator, dtype=torch.float64)
    positions, causal = torch.arange(12), CausalStates(4)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal(q[None], k[None], v[None])[0]

    ours = model.head(embedding.float(), hidden.float(), positions, attend)
    expected = head_in_float64(weights, config, embedding, hidden)
    torch.testing.assert_close(ours.double(), expected, **TOLERANCE)
    seen: list[torch.Tensor] = []

    def spying(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.extend((k, v))
        return attend(q, k, v)

    model.head(embedding.float(), hidden.float(), positions, spying)
    for stored, used in zip(
        model.head.store(embedding.float(), hidden.float(), positions), seen, strict=True
    ):
        torch.testing.assert_close(stored, used, atol=1e-6, rtol=0)


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_rows(rows: int, seed: int) -> Rows:
    """``q, k, delta, g, state`` of two requests, two groups, four heads."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, rows, 2, 8, generator=generator)
    delta = torch.randn(2, rows, 4, 6, generator=generator)
    g = -torch.rand(2, rows, 4, generator=generator) * 2
    return q, k, delta, g, torch.randn(2, 4, 8, 6, generator=generator)


def by_recurrence(inputs: Rows, path: list[int], request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Last output and state after the rows of ``path`` one by one, in float64."""
    q, k, delta, g, state = (x[request].double() for x in inputs)
    out = torch.zeros(4, 6, dtype=torch.float64)
    for row in path:
        for head in range(4):
            state[head] = state[head] * g[row, head].exp()
            state[head] += torch.outer(k[row, head // 2], delta[row, head])
            out[head] = state[head].T @ q[row, head // 2]
    return out, state


@pytest.mark.parametrize(("rows", "chunk"), [(1, 64), (9, 4), (12, 4), (70, 64)])
def test_chunks_equal_the_recurrence(rows: int, chunk: int) -> None:
    inputs = random_rows(rows, rows)
    out, state = chunked_ssd(*inputs, chunk)
    for request in range(2):
        for row in (0, rows // 2, rows - 1):
            expected = by_recurrence(inputs, list(range(row + 1)), request)[0]
            torch.testing.assert_close(out[request, row].double(), expected, **TOLERANCE)
        expected = by_recurrence(inputs, list(range(rows)), request)[1]
        torch.testing.assert_close(state[request].double(), expected, **TOLERANCE)


def test_rows_of_a_chain_equal_the_recurrence() -> None:
    inputs = random_rows(ROWS, 1)
    out = ssd_rows(*inputs)
    for request in range(2):
        for row in range(ROWS):
            expected = by_recurrence(inputs, list(range(row + 1)), request)[0]
            torch.testing.assert_close(out[request, row].double(), expected, **TOLERANCE)


PATHS = ([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5], [0, 1, 3, 6])  # row i ends PATHS[i]


def test_rows_of_a_tree_see_their_own_path_only() -> None:
    inputs = random_rows(len(PATHS), 2)
    ancestors = torch.tensor([[j in path for j in range(len(PATHS))] for path in PATHS])
    for given in (ancestors, ancestors.expand(2, -1, -1)):
        out = ssd_rows(*inputs, given)
        for request in range(2):
            for row, path in enumerate(PATHS):
                expected = by_recurrence(inputs, path, request)[0]
                torch.testing.assert_close(out[request, row].double(), expected, **TOLERANCE)


def test_a_commit_keeps_exactly_the_rows_named() -> None:
    inputs = random_rows(ROWS, 3)
    _, k, delta, g, state = inputs
    for first, second in (([], [0]), ([0, 1, 2], list(range(ROWS))), ([0, 2, 5], [0, 1, 3, 6])):
        kept = torch.tensor([[j in rows for j in range(ROWS)] for rows in (first, second)])
        after = ssd_commit(k, delta, g, state, kept)
        for request, rows in enumerate((first, second)):
            expected = by_recurrence(inputs, rows, request)[1]
            torch.testing.assert_close(after[request].double(), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern 'MX\\*'"),
        ({"layers_block_type": ["mamba", "linear"]}, "layers_block_type"),
        ({"n_groups": 3}, "n_groups 3"),
        ({"head_dim": 12}, "head_dim 12"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        ({"mtp_hybrid_override_pattern": "ME"}, "mtp_hybrid_override_pattern 'ME'"),
        ({"mtp_use_rope": True}, "mtp_use_rope True"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_config_that_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_config(write_checkpoint(tmp_path, hf_config(**changes), {}))


def test_layers_may_be_named_one_by_one_in_either_spelling(tmp_path: Path) -> None:
    by_pattern = read_config(tiny_checkpoint(tmp_path / "pattern"))
    for index, names in enumerate(
        (
            ["mamba", "moe", "mamba", "attention", "moe"],
            ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
        )
    ):
        config = hf_config(layers_block_type=names, mtp_layers_block_type=["attention", "moe"])
        del config["hybrid_override_pattern"], config["mtp_hybrid_override_pattern"]
        folder = write_checkpoint(tmp_path / str(index), config, random_weights(config))
        assert read_config(folder) == by_pattern


def test_a_checkpoint_without_head_is_refused_for_speculation(tmp_path: Path) -> None:
    config = hf_config(num_nextn_predict_layers=0)
    folder = write_checkpoint(tmp_path, config, random_weights(config))
    load_model(folder)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers 0"):
        load_model(folder, with_head=True)
