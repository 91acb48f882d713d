"""Draft trees change the speed and never the output, and their best way is taken and kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import engine, outputs, run
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp.config import MtpConfig
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.executor.draft import Drafts, NullProposer
from tllm_wmtp.executor.request import Request
from tllm_wmtp.executor.sampler import StepSampler
from tllm_wmtp.sampling import SamplingParams
from tllm_wmtp.tree import TreeShape

VOCAB = 97
PROMPTS = random_prompts([1, 5, 40, 17, 70], VOCAB, seed=1)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=["moe", "dense"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3, moe=request.param == "moe")


@pytest.fixture(scope="module")
def dense_outputs(checkpoint: Path) -> list[list[int]]:
    return outputs(run(engine(checkpoint), PROMPTS, PARAMS))


class PlantedTree(NullProposer):
    """Trees that hold the right continuation for ``right(draft_len)`` levels, anywhere in a level,
    among wrong drafts with random parents."""

    def __init__(self, depth: int, width: int, truth: dict[tuple[int, ...], list[int]], seed: int):
        super().__init__(torch.device("cpu"))
        self.depth, self.tree_width, self.truth = depth, width, truth
        self.chance = random.Random(seed)
        self.planted: dict[int, list[int]] = {}

    def propose(self, requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        shape = TreeShape(self.tree_width, draft_len + 1)
        tokens, parents = [], []
        for request in requests:
            done = len(request.output_ids)
            coming = self.truth[tuple(request.prompt_ids)][done : done + draft_len]
            right = self.chance.randint(0, len(coming))
            row_tokens, row_parents, truth_row = [0], [0], 0
            for level in range(1, draft_len + 1):
                above = range(shape.rows)[shape.level(level - 1)]
                here = range(shape.rows)[shape.level(level)]
                spot = self.chance.choice(here)
                for row in here:
                    if level <= right and row == spot:
                        row_tokens.append(coming[level - 1])
                        row_parents.append(truth_row)
                        continue
                    wrong = self.chance.randrange(VOCAB)
                    while level <= len(coming) and wrong == coming[level - 1]:
                        wrong = self.chance.randrange(VOCAB)
                    row_tokens.append(wrong)
                    row_parents.append(self.chance.choice(above))
                if level <= right:
                    truth_row = spot
            tokens.append(row_tokens[1:])
            parents.append(row_parents)
            self.planted.setdefault(request.request_id, []).append(right)
        return Drafts(torch.tensor(tokens), torch.tensor(parents))


@pytest.mark.parametrize(("width", "depth"), [(2, 2), (2, 7), (3, 5), (5, 3)])
def test_the_planted_way_is_accepted_in_full_and_leaves_right_states(
    checkpoint: Path, dense_outputs: list[list[int]], width: int, depth: int
) -> None:
    truth = {tuple(p): o for p, o in zip(PROMPTS, dense_outputs, strict=True)}
    proposer = PlantedTree(depth, width, truth, seed=width * depth)
    requests = run(engine(checkpoint, proposer=proposer), PROMPTS, PARAMS)
    assert outputs(requests) == dense_outputs
    for request in requests:
        planted = proposer.planted[request.request_id]
        histogram = [planted.count(n) for n in range(depth)]
        assert request.metrics.accepted_histogram == histogram
        assert sum(planted) > 0


@pytest.mark.parametrize("window", [1, 8, 200, None])
@pytest.mark.parametrize(("width", "depth"), [(1, 7), (2, 2), (2, 7), (4, 4)])
def test_drafted_trees_change_nothing(
    checkpoint: Path,
    dense_outputs: list[list[int]],
    width: int,
    depth: int,
    window: int | None,
) -> None:
    speculation = MtpConfig(depth, window, 3 if window else 0, tree_width=width)
    assert outputs(run(engine(checkpoint, speculation), PROMPTS, PARAMS)) == dense_outputs


def test_a_tree_accepts_at_least_what_its_first_way_would(checkpoint: Path) -> None:
    """Same head, same window: the most likely chain is one of the ways through the tree."""
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    lengths = []
    for width in (1, 4):
        speculation = MtpConfig(depth=3, window=20, n_sink=2, tree_width=width)
        requests = run(engine(checkpoint, speculation), PROMPTS, params)
        lengths.append(sum(request.metrics.steps for request in requests))
    assert lengths[1] < lengths[0]


def test_adaptive_depth_changes_nothing(checkpoint: Path, dense_outputs: list[list[int]]) -> None:
    for width in (1, 2):
        speculation = MtpConfig(7, 20, 3, adaptive_depth=True, tree_width=width)
        requests = run(engine(checkpoint, speculation), PROMPTS, PARAMS)
        assert outputs(requests) == dense_outputs


def test_depths_that_come_and_go_leave_no_stale_keys(
    checkpoint: Path, dense_outputs: list[list[int]]
) -> None:
    """After any run of steps without drafts the head proposes what it would have proposed."""
    speculation = MtpConfig(depth=5, window=12, n_sink=2)
    steady = engine(checkpoint, speculation, max_batch_size=1)
    wanted = _proposals(steady, [4] * 200)
    for seed, lengths in enumerate(([0, 4], [0] * 20 + [4], [0, 1, 4, 2], [0] * 40 + [3, 4])):
        changing = engine(checkpoint, speculation, max_batch_size=1)
        chance = random.Random(seed)
        plan = [chance.choice(lengths) for _ in range(200)] if len(lengths) < 10 else lengths * 9
        proposed = _proposals(changing, plan)
        both = wanted.keys() & {at for at, row in proposed.items() if row}
        assert len(both) > 3
        for at in both:
            size = len(proposed[at])
            assert proposed[at] == wanted[at][:size]


def _proposals(machine, draft_lens: list[int]) -> dict[int, list[int]]:  # type: ignore[no-untyped-def]
    """Drafts by output length before the step, when step i drafts ``draft_lens[i]``."""
    made: dict[int, list[int]] = {}
    propose, plan = machine.proposer.propose, iter(draft_lens)
    machine._draft_len = lambda requests: next(plan)

    def recording(requests, draft_len, sampler):  # type: ignore[no-untyped-def]
        drafts = propose(requests, draft_len, sampler)
        made[len(requests[0].output_ids)] = drafts.tokens[0].tolist()
        return drafts

    machine.proposer.propose = recording
    run(machine, [PROMPTS[2]], SamplingParams(max_tokens=150, ignore_eos=True))
    return made


def test_steps_without_drafts_let_few_rows_wait(checkpoint: Path) -> None:
    """Their hidden states are kept until a step drafts, so that may not be all of a long output."""
    machine = engine(checkpoint, MtpConfig(depth=5, window=12, n_sink=2), max_batch_size=1)
    machine._draft_len = lambda requests: 0  # type: ignore[method-assign]
    request = machine.submit(PROMPTS[2], PARAMS)
    most = 0
    while machine.step():
        if request.draft_hidden is not None:
            assert request.draft_hidden.untyped_storage().nbytes() <= 17 * 64 * 4
            most = max(most, len(request.draft_tokens))
    assert most == 17  # the sixteen that may wait, and the pending token's


@pytest.mark.parametrize("width", [0, -1, 2.0, True])
def test_a_tree_without_width_is_refused(width: object) -> None:
    with pytest.raises(ConfigError, match="tree_width"):
        MtpConfig(tree_width=width)  # type: ignore[arg-type]


def test_a_tree_is_as_wide_as_the_vocabulary_and_no_wider(
    checkpoint: Path, dense_outputs: list[list[int]]
) -> None:
    speculation = MtpConfig(depth=3, window=20, n_sink=3, tree_width=VOCAB)
    machine = engine(checkpoint, speculation)
    assert outputs(run(machine, PROMPTS[:2], PARAMS)) == dense_outputs[:2]
    with pytest.raises(ConfigError, match=f"tree_width {VOCAB + 1}: .*vocabulary has {VOCAB}"):
        engine(checkpoint, replace(speculation, tree_width=VOCAB + 1))
