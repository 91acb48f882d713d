"""Where windows, chunks, lanes and positions meet their ends.

A ring that loses a key costs acceptance and no token, so the drafts are held to those of a head
that has all its keys in one attention, and the output to the dense arm's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import tiny_nemotron
import torch
from engines import HeadOracle, engine, oracle_proposals, outputs, run
from tiny_model import random_prompts, tiny_checkpoint

import tllm_wmtp.models.states as states_module
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.errors import ConfigError, RequestError
from tllm_wmtp.executor.draft import Drafts, MtpProposer
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.executor.sampler import StepSampler
from tllm_wmtp.sampling import SamplingParams

VOCAB = 7
DEPTH, WINDOW, N_SINK = 4, 6, 3
WINDOWED = MtpConfig(depth=DEPTH, window=WINDOW, n_sink=N_SINK)
CAPACITY = N_SINK + WINDOW + DEPTH
ARMS = pytest.mark.parametrize(
    "speculation", [None, WINDOWED, MtpConfig.native(depth=5)], ids=["dense", "windowed", "native"]
)

#: How many of a step's drafts are to be right, by the request.
Accept = Callable[[Request], int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        seed=31,
        vocab_size=VOCAB,
        moe=False,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def dense(checkpoint: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    return outputs(run(engine(checkpoint), prompts, greedy(tokens)))


def check_drafts(machine: Engine) -> list[int]:
    """Holds every later draft to the oracle; grows by the position of each step."""
    proposer = machine.proposer
    assert isinstance(proposer, MtpProposer)
    window, n_sink = proposer.spec.window, proposer.spec.n_sink
    propose, checked = proposer.propose, []

    def checking(requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        drafts = propose(requests, draft_len, sampler)
        for request, row in zip(requests, drafts.tokens.tolist(), strict=True):
            assert row == oracle_proposals(proposer, request, window, n_sink)[:draft_len]
            checked.append(request.kv_length)
        return drafts

    proposer.propose = checking  # type: ignore[method-assign]
    return checked


def accept(machine: Engine, truth: dict[tuple[int, ...], list[int]], right: Accept) -> None:
    """The head drafts as ever, then ``right`` says how many of the drafts are right."""
    propose = machine.proposer.propose

    def choosing(requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        propose(requests, draft_len, sampler)
        rows = []
        for request in requests:
            done = len(request.output_ids)
            coming = truth[tuple(request.prompt_ids)][done : done + draft_len]
            assert len(coming) == draft_len, "the truth ends before the drafts do"
            count = right(request)
            rows.append([i if at < count else (i + 1) % VOCAB for at, i in enumerate(coming)])
        return Drafts(torch.tensor(rows, dtype=torch.int64))

    machine.proposer.propose = choosing  # type: ignore[method-assign]


def assert_everything_is_back(machine: Engine) -> None:
    assert machine.kv.free_pages == machine.kv.pages
    assert machine.recurrent.free_slots == machine.recurrent.slots
    assert machine.proposer.lanes_used == 0


@pytest.mark.parametrize("length", [1, 7, 19, 20, 21])
def test_a_sink_longer_than_the_prompt_fills_up_as_the_output_grows(
    checkpoint: Path, length: int
) -> None:
    prompts = random_prompts([length], VOCAB, seed=length)
    machine = engine(checkpoint, MtpConfig(depth=DEPTH, window=5, n_sink=20))
    checked = check_drafts(machine)
    assert outputs(run(machine, prompts, greedy(40))) == dense(checkpoint, prompts, 40)
    assert checked[-1] > 20 + 5 + DEPTH  # the ring has gone round


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("size", [N_SINK, N_SINK + WINDOW, CAPACITY])
def test_a_prompt_of_exactly_the_sinks_the_visible_keys_or_the_ring(
    checkpoint: Path, size: int, more: int
) -> None:
    prompts = random_prompts([size + more], VOCAB, seed=size)
    machine = engine(checkpoint, WINDOWED)
    checked = check_drafts(machine)
    assert outputs(run(machine, prompts, greedy(20))) == dense(checkpoint, prompts, 20)
    assert checked[0] == size + more


@pytest.mark.parametrize("chunk", [1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 4 * CAPACITY])
@pytest.mark.parametrize("pruning", [True, False])
def test_a_prefill_in_chunks_around_the_capacity_of_the_ring(
    checkpoint: Path, chunk: int, pruning: bool
) -> None:
    lengths = [CAPACITY + 1, 4 * CAPACITY, 4 * CAPACITY + 1, 5 * CAPACITY + 2]
    prompts = random_prompts(lengths, VOCAB, seed=chunk)
    machine = engine(checkpoint, WINDOWED, prefill_chunk=chunk, prefill_pruning=pruning)
    checked = check_drafts(machine)
    assert outputs(run(machine, prompts, greedy(9))) == dense(checkpoint, prompts, 9)
    assert set(lengths) <= set(checked)


def test_a_rejection_exactly_at_the_wrap_of_the_ring_loses_no_key(checkpoint: Path) -> None:
    """Every first row of a step from before the wrap to after it, every number accepted there;
    and the same again one turn of the ring later."""
    wrap = N_SINK + (CAPACITY - N_SINK)  # this position takes the slot of the first after the sinks
    assert machine_slot(wrap) == machine_slot(N_SINK) == N_SINK
    assert machine_slot(wrap - 1) == CAPACITY - 1
    for turn in (0, CAPACITY - N_SINK):
        prompts = random_prompts([*range(wrap - DEPTH + turn, wrap + 2 + turn)], VOCAB, seed=8)
        truth = dict(zip(map(tuple, prompts), dense(checkpoint, prompts, 30), strict=True))
        for prompt, right in itertools.product(prompts, range(DEPTH)):
            start = len(prompt)
            machine = engine(checkpoint, WINDOWED, max_batch_size=1)
            checked = check_drafts(machine)
            plan = iter([right, 0, right, 2, 0])
            accept(machine, truth, lambda _, plan=plan: next(plan, 1))  # type: ignore[misc]
            (request,) = run(machine, [prompt], greedy(14))
            assert request.output_ids == truth[tuple(prompt)][:14]
            assert request.metrics.accepted[:2] == [right, 0]
            assert checked[:2] == [start, start + right + 1]


def machine_slot(position: int) -> int:
    """By the definition of the ring, not by the code."""
    return position if position < N_SINK else N_SINK + (position - N_SINK) % (CAPACITY - N_SINK)


def oracle_tree(
    oracle: HeadOracle, output: list[int], width: int, draft_len: int, penalty: float
) -> list[list[tuple[int, ...]]]:
    """Per level the ``width`` likeliest paths that continue those of the level before.

    ``penalty`` is subtracted from the logit of what the output or the path holds.
    """
    levels: list[list[tuple[int, ...]]] = []
    likelihoods: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(draft_len):
        longer: dict[tuple[int, ...], float] = {}
        for path, likelihood in likelihoods.items():
            logits = oracle.logits(path).double()
            held = {*output, *path}
            logits[list(held)] -= penalty
            for token, logprob in enumerate(logits.log_softmax(-1).tolist()):
                longer[(*path, token)] = likelihood + logprob
        best = sorted(longer, key=longer.__getitem__, reverse=True)[:width]
        levels.append(best)
        likelihoods = {path: longer[path] for path in best}
    return levels


@pytest.mark.parametrize("penalty", [0.0, 1.5])
@pytest.mark.parametrize("width", [2, 3])
def test_a_tree_holds_the_likeliest_ways_of_a_head_without_a_ring(
    checkpoint: Path, width: int, penalty: float
) -> None:
    """So the rows that were accepted, wherever in their tree they were, are in the ring as well."""
    machine = engine(checkpoint, MtpConfig(DEPTH, WINDOW, N_SINK, tree_width=width))
    proposer = machine.proposer
    assert isinstance(proposer, MtpProposer)
    propose, checked = proposer.propose, []

    def checking(requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        drafts = propose(requests, draft_len, sampler)
        assert drafts.parents is not None
        for at, request in enumerate(requests):
            tokens, parents = [0, *drafts.tokens[at].tolist()], drafts.parents[at].tolist()
            paths: list[tuple[int, ...]] = [()]
            for row in range(1, len(tokens)):
                paths.append((*paths[parents[row]], tokens[row]))
            oracle = HeadOracle(proposer, request, WINDOW, N_SINK)
            wanted = oracle_tree(oracle, request.output_ids, width, draft_len, penalty)
            checked.append(paths[1:] == [path for level in wanted for path in level])
        return drafts

    proposer.propose = checking  # type: ignore[method-assign]
    prompts = random_prompts([3, 13, 30], VOCAB, seed=6)
    params = SamplingParams(max_tokens=24, ignore_eos=True, presence_penalty=penalty)
    requests = run(machine, prompts, params)
    assert outputs(requests) == outputs(run(engine(checkpoint), prompts, params))
    assert len(checked) > 20
    assert all(checked)
    assert sum(sum(request.metrics.accepted) for request in requests) > 15


@ARMS
def test_a_request_none_of_whose_drafts_is_right_still_equals_the_dense_arm(
    checkpoint: Path, speculation: MtpConfig | None
) -> None:
    prompts = random_prompts([3, 30], VOCAB, seed=4)
    truth = {tuple(p): o for p, o in zip(prompts, dense(checkpoint, prompts, 50), strict=True)}
    machine = engine(checkpoint, speculation)
    accept(machine, truth, lambda _: 0)
    for request in run(machine, prompts, greedy(40)):
        assert request.output_ids == truth[tuple(request.prompt_ids)][:40]
        assert request.metrics.accepted_histogram == [39] + [0] * (machine.proposer.depth - 1)
        assert request.metrics.acceptance_length == 1.0
    assert_everything_is_back(machine)


@pytest.mark.parametrize("steps", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_none_and_all_accepted_in_turn_keep_the_pools_in_balance(
    checkpoint: Path, steps: int
) -> None:
    prompts = random_prompts([1, CAPACITY - 1, 2 * CAPACITY + 3], VOCAB, seed=12)
    truth = {tuple(p): o for p, o in zip(prompts, dense(checkpoint, prompts, 90), strict=True)}
    machine = engine(checkpoint, WINDOWED, max_batch_size=3)
    turn: dict[int, Iterator[int]] = {}

    def right(request: Request) -> int:
        first = request.request_id % 2
        each = turn.setdefault(request.request_id, itertools.cycle((first, 1 - first)))
        return next(each) * (DEPTH - 1)

    accept(machine, truth, right)
    requests: list[Request] = []
    made = 0
    while made < steps:
        requests = [machine.submit(prompt, greedy(80)) for prompt in prompts]
        while machine.step():
            running = machine.scheduler.running
            held = [page for request in running for page in request.pages]
            assert len(set(held)) == len(held) == machine.kv.pages - machine.kv.free_pages
            assert machine.proposer.lanes_used == len(running)
            assert machine.recurrent.slots - machine.recurrent.free_slots == len(running)
        for request in requests:
            assert request.output_ids == truth[tuple(request.prompt_ids)][:80]
            histogram = request.metrics.accepted_histogram
            assert histogram[0] + histogram[-1] == request.metrics.steps
            assert abs(histogram[0] - histogram[-1]) <= 1
            made += request.metrics.steps
        assert_everything_is_back(machine)


@pytest.mark.parametrize("ends", ["aborted", "failed"])
def test_a_lane_whose_owner_ends_with_drafts_in_it_is_clean_for_the_next(
    checkpoint: Path, ends: str
) -> None:
    first, second = random_prompts([25, 2], VOCAB, seed=3)
    machine = engine(checkpoint, WINDOWED, max_batch_size=1)
    checked = check_drafts(machine)
    request = machine.submit(first, greedy(60))
    while len(request.output_ids) < 12:
        machine.step()
    lane = request.lane
    assert lane is not None
    if ends == "aborted":
        machine.abort(request)
    else:
        propose = machine.proposer.propose

        def failing(requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
            propose(requests, draft_len, sampler)
            raise RuntimeError("between draft and verify")

        machine.proposer.propose = failing  # type: ignore[method-assign]
        machine.step()
        assert request.finish_reason == "error"
        machine.proposer.propose = propose  # type: ignore[method-assign]
    checked.clear()
    follower = machine.submit(second, greedy(30))
    machine.step()
    assert follower.lane is not None
    assert follower.lane.index == lane.index
    while machine.step():
        pass
    assert follower.output_ids == dense(checkpoint, [second], 30)[0]
    assert checked[0] == len(second)
    assert_everything_is_back(machine)


def test_the_last_lane_of_the_pool_is_as_good_as_the_first(checkpoint: Path) -> None:
    prompts = random_prompts([9, 14, 1, 40], VOCAB, seed=5)
    machine = engine(checkpoint, WINDOWED, max_batch_size=len(prompts))
    checked = check_drafts(machine)
    requests = [machine.submit(prompt, greedy(24)) for prompt in prompts]
    lanes: set[int] = set()
    while machine.step():
        lanes |= {request.lane.index for request in requests if request.lane is not None}
    assert lanes == {0, 1, 2, 3}
    assert outputs(requests) == dense(checkpoint, prompts, 24)
    assert len(checked) > 20


LIMIT = 48


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of few positions."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("short"),
        seed=31,
        vocab_size=VOCAB,
        moe=False,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        max_position_embeddings=LIMIT,
    )


@ARMS
def test_a_context_beyond_the_models_positions_is_refused_and_one_at_the_limit_served(
    short: Path, speculation: MtpConfig | None
) -> None:
    machine = engine(short, speculation, max_seq_len=None)
    for length in (LIMIT, LIMIT + 1, 1000):
        with pytest.raises(RequestError, match=f"has {LIMIT} positions"):
            machine.submit([1] * length, greedy(1))
    prompts = random_prompts([LIMIT - 1, LIMIT - 2, LIMIT - 6, 1], VOCAB, seed=7)
    requests = run(machine, prompts, greedy(1000))
    assert [len(request.output_ids) for request in requests] == [1, 2, 6, LIMIT - 1]
    assert {request.finish_reason for request in requests} == {"length"}
    assert outputs(requests) == outputs(run(engine(short, max_seq_len=LIMIT), prompts, greedy(99)))
    assert_everything_is_back(machine)


def test_limits_beyond_the_models_positions_are_refused(short: Path) -> None:
    with pytest.raises(ConfigError, match=f"max_seq_len {LIMIT + 1}"):
        engine(short, max_seq_len=LIMIT + 1)
    with pytest.raises(ConfigError, match=f"= {LIMIT + 1}"):
        engine(short, MtpConfig(depth=2, window=LIMIT - 3, n_sink=4), max_seq_len=None)
    machine = engine(short, MtpConfig(depth=2, window=LIMIT - 4, n_sink=4), max_seq_len=None)
    prompts = random_prompts([30], VOCAB)
    assert outputs(run(machine, prompts, greedy(99))) == outputs(
        run(engine(short, max_seq_len=LIMIT), prompts, greedy(99))
    )


def test_a_request_that_is_put_back_between_draft_and_verify_can_be_resumed(
    checkpoint: Path,
) -> None:
    """The exception of a step leaves it as it was: also when memory is taken away after it."""
    prompts = random_prompts([25, 11], VOCAB, seed=6)
    machine = engine(checkpoint, WINDOWED)
    checked = check_drafts(machine)
    propose, failures = machine.proposer.propose, [0]

    def failing(requests: Sequence[Request], draft_len: int, sampler: StepSampler) -> Drafts:
        drafts = propose(requests, draft_len, sampler)
        if len(requests) == 2 and len(requests[0].output_ids) > 8 * (failures[0] + 1):
            failures[0] += 1
            raise RuntimeError("between draft and verify")
        return drafts

    machine.proposer.propose = failing  # type: ignore[method-assign]
    requests = [machine.submit(prompt, greedy(40)) for prompt in prompts]
    known = 0
    while machine.step():
        if failures[0] > known and requests[0].phase is Phase.DECODE:
            known = failures[0]
            machine.scheduler.preempt(machine.scheduler.running[-1])
    assert outputs(requests) == dense(checkpoint, prompts, 40)
    assert known >= 2
    assert sum(request.metrics.preemptions for request in requests) >= 2
    assert len(checked) > 20
    assert_everything_is_back(machine)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_commit_that_fails_is_repeated_from_the_states_before_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, width: int
) -> None:
    """As when memory runs out there: convolution and recurrent state change together or not."""
    if family == "nemotron_h":
        checkpoint = tiny_nemotron.tiny_checkpoint(tmp_path, seed=3, vocab_size=VOCAB)
    prompts = random_prompts([25, 11], VOCAB, seed=6)
    expected = dense(checkpoint, prompts, 30)
    machine = engine(checkpoint, MtpConfig(DEPTH, WINDOW, N_SINK, tree_width=width))
    name = "ssd_commit" if family == "nemotron_h" else "_gated_delta_commit"
    commit, calls = getattr(states_module, name), [0]

    def failing(*arguments: torch.Tensor) -> torch.Tensor | None:
        calls[0] += 1
        if calls[0] % 4 == 1:  # the repetition of a step is never the next of these
            raise MemoryError("out of memory")
        result: torch.Tensor | None = commit(*arguments)
        return result

    monkeypatch.setattr(states_module, name, failing)
    assert outputs(run(machine, prompts, greedy(30))) == expected
    assert calls[0] > 12
    assert_everything_is_back(machine)
