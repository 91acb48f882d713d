"""Speculative output is distributed as the target's own: chi-square against exact probabilities.

Draft and target are Markov chains over 8 tokens. The oracle multiplies float64 probabilities over
every output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from chi_square import fit
from sampling_reference import joint

from tllm_wmtp.executor import sampler
from tllm_wmtp.executor.sampler import SamplingState, StepSampler
from tllm_wmtp.sampling import SamplingParams

VOCAB, LENGTH = 8, 3
# A bias of 2 % shows in MANY; a penalty costs time per request.
MANY, SOME, FEW = 20_000, 4000, 1000
PROMPT = (5, 1, 1)
SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.75),
    "min_p": SamplingParams(min_p=0.2),
    "everything": SamplingParams(
        temperature=1.3,
        min_p=0.05,
        top_k=6,
        top_p=0.95,
        repetition_penalty=1.15,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    ),
}
# Rewards rather than penalties: what becomes likelier shows sooner than what becomes rare.
PENALTIES = {
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=0.3),
    "presence": SamplingParams(temperature=1.0, presence_penalty=-2.0),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=-1.5),
}

LATER = [pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)]
SEEDS = pytest.mark.parametrize("seed", [0, *LATER])

Tables = tuple[torch.Tensor, torch.Tensor]
Tokens = list[list[int]]
Step = Callable[[StepSampler, torch.Tensor, Tables, int], Tokens]


def chains(likeness: float) -> Tables:
    """Logits ``[V, V]`` of draft and target after each token."""
    generator = torch.Generator().manual_seed(0)
    other, target = torch.randn(2, VOCAB, VOCAB, generator=generator).mul(1.2).unbind(0)
    return likeness * target + (1 - likeness) * other, target


#: About every second draft is refused.
UNLIKE = chains(0.0)
#: Most drafts are kept, and new tokens are often repeated at once: penalties must know the drafts.
ALIKE = chains(0.8)
for table in ALIKE:
    table.diagonal().fill_(1.0)


def exact(params: SamplingParams, target: torch.Tensor) -> dict[tuple[int, ...], float]:
    rows = target.double().tolist()
    return joint(lambda tokens: rows[tokens[-1]], params, PROMPT, LENGTH)


def chain(step: StepSampler, pending: torch.Tensor, model: Tables, draft_len: int) -> Tokens:
    drafts = [pending]
    for _ in range(draft_len):
        drafts.append(step.draft(model[0][drafts[-1]]))
    rows = torch.stack(drafts, 1)
    return step.verify(model[1][rows], rows[:, 1:]).tokens


def certain(step: StepSampler, pending: torch.Tensor, model: Tables, draft_len: int) -> Tokens:
    """Drafts from no distribution, as an n-gram table would give."""
    rows = (pending.unsqueeze(1) * 3 + torch.arange(draft_len + 1)) % VOCAB
    rows[:, 0] = pending
    return step.verify(model[1][rows], rows[:, 1:]).tokens


CHILDREN = [[1, 2, 3], [4, 5], [6, 7], [], [], [], [], []]


def tree(step: StepSampler, pending: torch.Tensor, model: Tables, draft_len: int) -> Tokens:
    """Three tokens after the pending one, two after each of the likeliest two."""
    batch = pending.shape[0]
    first = step.candidates(model[0][pending], 3)[0]
    parents = first[:, :2].reshape(-1, 1)
    second = step.candidates(model[0][parents[:, 0]], 2, parents)[0].reshape(batch, 4)
    tokens = torch.cat((pending.unsqueeze(1), first, second), 1)
    verdict, paths = step.walk(model[1][tokens], tokens, [CHILDREN] * batch)
    assert verdict.accepted.tolist() == [len(path) - 1 for path in paths]
    return verdict.tokens


def outputs(
    settings: Sequence[SamplingParams],
    seed: int,
    step: Step = chain,
    depths: Sequence[int] = (3,),
    model: Tables = UNLIKE,
) -> list[tuple[int, ...]]:
    """First tokens of requests that run together; ``depths`` are the draft lengths, step by step.

    The first token of each is the target's alone, as after a prefill.
    """
    states = [
        SamplingState(
            SamplingParams(**{**vars(params), "seed": seed * 1_000_003 + i}), PROMPT, VOCAB
        )
        for i, params in enumerate(settings)
    ]
    last = model[1][PROMPT[-1]].expand(len(states), VOCAB)
    made = StepSampler(states).choose(last).tokens
    for state, tokens in zip(states, made, strict=True):
        state.commit(tokens)
    round_ = 0
    while True:
        behind = [i for i, tokens in enumerate(made) if len(tokens) < LENGTH]
        if not behind:
            return [tuple(tokens[:LENGTH]) for tokens in made]
        pending = torch.tensor([made[i][-1] for i in behind])
        gained = step(
            StepSampler([states[i] for i in behind]), pending, model, depths[round_ % len(depths)]
        )
        for i, tokens in zip(behind, gained, strict=True):
            made[i] += tokens
            states[i].commit(tokens)
        round_ += 1


def repeats(output: tuple[int, ...]) -> tuple[bool, ...]:
    """For each token whether the prompt or the output had it before."""
    return tuple(token in (*PROMPT, *output[:i]) for i, token in enumerate(output))


def p_value(params: SamplingParams, seed: int, requests: int, step: Step = chain, **more) -> float:
    """The p value of whole outputs; with penalties the one of :func:`repeats`, if it is lower.

    Bonferroni: the lower of two counts twice.
    """
    model = ALIKE if params.penalised else UNLIKE
    made = Counter(outputs([params] * requests, seed, step, model=model, **more))
    expected = exact(params, model[1])
    whole = fit(made, expected)
    if not params.penalised:
        return whole
    seen, due = Counter[tuple[bool, ...]](), Counter[tuple[bool, ...]]()
    for output, count in made.items():
        seen[repeats(output)] += count
    for output, probability in expected.items():
        due[repeats(output)] += probability
    return min(1.0, 2 * min(whole, fit(seen, due)))


@SEEDS
@pytest.mark.parametrize("name", SETTINGS)
def test_a_chain_of_drafts_leaves_the_distribution_alone(name: str, seed: int) -> None:
    requests = {"plain": MANY, "everything": FEW}.get(name, SOME)
    assert p_value(SETTINGS[name], seed, requests) > 0.01


@SEEDS
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_see_the_drafts_before_a_row(name: str, seed: int) -> None:
    assert p_value(PENALTIES[name], seed, FEW) > 0.01


@SEEDS
@pytest.mark.parametrize("name", ["plain", "top_p", "everything"])
def test_a_tree_of_drafts_leaves_the_distribution_alone(name: str, seed: int) -> None:
    requests = FEW if name == "everything" else SOME
    assert p_value(SETTINGS[name], seed, requests, tree) > 0.01


@SEEDS
def test_drafts_that_nobody_drew_leave_the_distribution_alone(seed: int) -> None:
    assert p_value(SETTINGS["plain"], seed, SOME, certain) > 0.01


@SEEDS
def test_the_depth_may_change_from_step_to_step(seed: int) -> None:
    assert p_value(SETTINGS["plain"], seed, SOME, depths=(0, 3, 1, 0, 2)) > 0.01


@SEEDS
def test_requests_of_different_settings_share_a_batch(seed: int) -> None:
    kinds = [SETTINGS["cold"], SamplingParams(), SETTINGS["top_k"], PENALTIES["presence"]]
    made = outputs(kinds * FEW, seed)
    for offset, params in enumerate(kinds):
        expected = exact(params, UNLIKE[1])
        mine = Counter(made[offset :: len(kinds)])
        if params.greedy:
            assert set(mine) == set(expected)
        else:
            assert fit(mine, expected) > 0.01


def biased(p: torch.Tensor, q: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    return uniforms < (p / q).clamp(max=1.0) + 0.02


@SEEDS
def test_two_percent_too_many_acceptances_are_noticed(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(sampler, "accepts", biased)
    assert p_value(SETTINGS["plain"], seed, MANY) < 1e-6


def test_not_subtracting_the_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "residual", lambda p, q: p)
    assert p_value(SETTINGS["plain"], 0, SOME) < 1e-6


@pytest.mark.parametrize("step", [chain, tree])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_without_the_drafts_are_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, step: Step
) -> None:
    penalise = SamplingState.penalise

    def blind(self: SamplingState, logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return penalise(self, logits, following[:0])

    monkeypatch.setattr(SamplingState, "penalise", blind)
    assert p_value(PENALTIES[name], 0, 3 * FEW, step) < 1e-6
