"""A step does the same work whatever its keys and values are; what is paired does not change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import random_prompts, tiny_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from tllm_wmtp.bench.content import (
    PrefilledContestant,
    check_content,
    median_interval,
    prompt_ids,
    refuse_drafts,
)
from tllm_wmtp.bench.step import ARMS, Contestant, StepBench
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model
from tllm_wmtp.demo import CHECKPOINT
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.models.layers.moe import SparseMoe

CONTEXT = 200
IDS = random_prompts([CONTEXT], 97, seed=4)[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint, with_head=True)


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tiny_checkpoint(tmp_path_factory.mktemp("many"), num_experts=32)
    return load_model(path, with_head=True)


def bench_of(checkpoint: Path, **changes: Any) -> StepBench:
    options = {"contexts": (CONTEXT,), "depth": 4, "window": 50, "n_sink": 6, "repeats": 6}
    return StepBench(model=checkpoint, **(options | changes))  # type: ignore[arg-type]


class Work(TorchDispatchMode):
    """Every operator that runs, with the shapes and types of its tensors. Of this project's own
    also the values of integer tensors (offsets, positions, pages, lanes), which say what of the
    caches is read."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = func.namespace == "wmtp"
        seen = [str(func)]
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.Tensor):
                seen.append(f"{value.dtype} {tuple(value.shape)}")
                if ours and not value.is_floating_point():
                    seen.append(str(value.tolist()))
            elif ours:
                seen.append(str(value))
        self.done.append(tuple(seen))
        return func(*args, **(kwargs or {}))


def pair(arm: str, loaded: LoadedModel, **changes: Any) -> tuple[Contestant, Contestant]:
    """A prefilled and a synthetic request, both after their first step, whose drafts all fail."""
    bench = bench_of(Path("tiny"), **changes)
    prefilled = PrefilledContestant(arm, bench, loaded, IDS)
    synthetic = Contestant(arm, bench, loaded, CONTEXT)
    for contestant in (prefilled, synthetic):
        refuse_drafts(contestant.engine, loaded.config.vocab_size)
    prefilled.prefill()
    synthetic.step()
    for contestant in (prefilled, synthetic):
        assert contestant.request.metrics.accepted == [0]
        assert contestant.request.kv_length == CONTEXT + 1
    return prefilled, synthetic


def work_of(contestant: Contestant) -> list[tuple[Any, ...]]:
    with Work() as work:
        contestant.step()
    assert contestant.request.metrics.steps == 2
    return work.done


@pytest.mark.parametrize("arm", ARMS)
def test_random_keys_cost_the_operators_shapes_and_reads_of_prefilled_ones(
    loaded: LoadedModel, arm: str
) -> None:
    prefilled, synthetic = pair(arm, loaded)
    keys = [contestant.engine.kv.k_pages[0] for contestant in (prefilled, synthetic)]
    assert not torch.allclose(keys[0][:3], keys[1][:3], atol=0.1)
    work = work_of(prefilled)
    assert work == work_of(synthetic)
    attention = [each for each in work if "attention" in each[0]]
    assert len(attention) == {"dense": 1, "native": 1 + 3, "windowed": 1 + 3}[arm]


def test_the_work_of_another_context_or_depth_is_another(loaded: LoadedModel) -> None:
    longer, _ = pair("windowed", loaded)
    longer.step()
    _, synthetic = pair("windowed", loaded)
    with Work() as work:
        longer.step()
    assert work.done != work_of(synthetic)
    _, shallow = pair("windowed", loaded, depth=3)
    _, deep = pair("windowed", loaded)
    assert work_of(shallow) != work_of(deep)


def test_every_row_is_routed_to_as_many_experts(
    many_experts: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ones, and so how many different ones a verify reads, depends on the content."""
    routed: list[torch.Size] = []
    mix = SparseMoe.mix

    def recorded(
        self: SparseMoe, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        routed.append(experts.shape)
        return mix(self, x, weights, experts)

    monkeypatch.setattr(SparseMoe, "mix", recorded)
    seen = []
    for contestant in pair("windowed", many_experts):
        routed.clear()
        contestant.step()
        seen.append(list(routed))
    assert seen[0] == seen[1]
    assert seen[0].count(torch.Size((1, 2))) == 3  # draft forwards
    assert seen[0].count(torch.Size((4, 2))) == 4  # layers of the verify


# The measured comparison.


def test_pairs_with_an_accepted_draft_do_not_count(checkpoint: Path, loaded: LoadedModel) -> None:
    result = check_content(bench_of(checkpoint), loaded)
    assert result["context"] == CONTEXT
    assert "random ids" in result["prompt"]
    assert [entry["arm"] for entry in result["arms"]] == list(ARMS)
    for entry in result["arms"]:
        assert entry["pairs"] + entry["pairs_left_out"] == 6
        low, high = entry["step_ratio_interval"]
        assert low <= entry["step_ratio"] <= high
        assert ("draft_ratio" in entry) == (entry["arm"] != "dense")


def test_too_few_pairs_are_an_error(
    checkpoint: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Contestant.step

    def accepting(self: Contestant, depth: int | None = None) -> None:
        step(self, depth)
        metrics = self.request.metrics
        metrics.accepted[-1] = 1

    monkeypatch.setattr(Contestant, "step", accepting)
    with pytest.raises(ConfigError, match="0 pairs of 6"):
        check_content(bench_of(checkpoint), loaded)


def test_the_prompt_of_a_demonstration_is_of_its_language() -> None:
    model = load_model(CHECKPOINT, with_head=True)
    bench = StepBench(model=CHECKPOINT, contexts=(600,))
    ids, made_of = prompt_ids(bench, model, 600)
    assert 500 < len(ids) <= 600
    assert "logs" in made_of
    elsewhere, made_of = prompt_ids(StepBench(model=Path("x"), contexts=(600,)), model, 600)
    assert len(elsewhere) == 600
    assert "help texts" in made_of


def test_the_interval_of_a_median_is_between_its_values() -> None:
    low, high = median_interval([1.0, 1.1, 0.9, 1.0, 5.0, 1.0, 1.05])
    assert 0.9 <= low <= 1.0 <= high <= 1.1
    assert median_interval([2.0, 2.0, 2.0]) == [2.0, 2.0]


@pytest.mark.slow
def test_random_keys_cost_a_tenth_more_or_less_than_prefilled_ones_at_most() -> None:
    """The 95 % interval of the median paired ratio lies within 0.9 .. 1.1 in every arm. A disturbed
    machine widens it; then it is measured again with more pairs, at most three times."""
    model = load_model(CHECKPOINT, with_head=True)
    for repeats in (40, 120, 360):
        bench = StepBench(model=CHECKPOINT, contexts=(16384,), repeats=repeats)
        arms = check_content(bench, model)["arms"]
        intervals = {entry["arm"]: entry["step_ratio_interval"] for entry in arms}
        if all(low > 0.9 and high < 1.1 for low, high in intervals.values()):
            return
    pytest.fail(f"step, random over prefilled, at 16,384 tokens: {intervals}")
