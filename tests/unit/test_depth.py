"""The depth controller against simulated text whose acceptance and costs are known.

Drafts and times are drawn at random; a run is judged by what its depths are worth in expectation,
so that luck with the drafts does not count.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tllm_wmtp.depth import AcceptanceEstimate, DepthController
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.latency import CostModel, LevelledTimes, StepTimes, fit_line

MAX_DEPTH = 7
CONTEXT = 65536

#: alpha_1 .. alpha_6. The last one is what this package's own head does on retrieval lists.
TEXTS: dict[str, tuple[float, ...]] = {
    "easy": (0.95,) * 6,
    "medium": (0.75,) * 6,
    "hard": tuple(0.35 * 0.85**j for j in range(6)),
    "hopeless": (0.02,) * 6,
    "uneven": (0.92, 0.79, 0.86, 0.99, 0.35, 0.98),
}


@dataclass(frozen=True)
class Machine:
    """Milliseconds: ``verify[depth - 1]``, and the draft's ``t_ctx`` and ``t_fwd``."""

    verify: tuple[float, ...]
    t_ctx: float
    t_fwd: float

    def draft(self, depth: int) -> float:
        return self.t_ctx + (depth - 1) * self.t_fwd if depth > 1 else 0.0

    def step(self, depth: int) -> float:
        return self.draft(depth) + self.verify[depth - 1]


def line(first: float, last: float) -> tuple[float, ...]:
    return tuple(first + (last - first) * i / (MAX_DEPTH - 1) for i in range(MAX_DEPTH))


MACHINES = {
    # The windowed arm of docs/benchmarks: dense and depth 7 measured, the rest between them.
    "cpu, 16K": Machine(line(3.22, 4.37), 0.0, 0.73),
    "cpu, 64K": Machine(line(5.26, 7.43), 0.0, 0.86),
    "cpu, 1M": Machine(line(42.1, 65.3), 0.0, 0.90),
    # The paper's fits at 1M: t_fwd 0.71 ms; at depth 5 a verify kernel doubles (593 -> 1133 us in
    # each of 12 full-attention layers).
    "gpu": Machine(line(12.0, 12.3), 1.0, 0.71),
    "gpu, verify jumps at 5": Machine(
        tuple(ms + (6.5 if i >= 4 else 0.0) for i, ms in enumerate(line(12.0, 12.3))), 1.0, 0.8
    ),
}
#: A full-context draft on a CPU at 1M: each forward costs nearly a verify.
NATIVE = Machine(line(42.1, 65.3), 0.0, 39.0)


def expected_tokens(alphas: Sequence[float], depth: int) -> float:
    total = product = 1.0
    for alpha in alphas[: depth - 1]:
        product *= alpha
        total += product
    return total


def best_depth(machine: Machine, text: str) -> int:
    return max(range(1, MAX_DEPTH + 1), key=lambda d: rate(machine, text, d))


def rate(machine: Machine, text: str, depth: int) -> float:
    """Expected tokens per millisecond."""
    return expected_tokens(TEXTS[text], depth) / machine.step(depth)


@dataclass
class Run:
    """A controller at work on one request; ``depths`` of all steps so far."""

    machine: Machine
    seed: int = 0
    noise: float = 0.04
    slowdown: float = 1.0
    context: int = CONTEXT
    controller: DepthController = field(default_factory=lambda: DepthController(MAX_DEPTH))
    depths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.request = self.controller.new_request()

    def disturbed(self, milliseconds: float) -> float:
        """Seconds with noise, one in fifty twice as long."""
        factor = max(1 + self.chance.gauss(0, self.noise), 0.3)
        if self.noise and self.chance.random() < 0.02:
            factor *= 2
        return milliseconds * factor * self.slowdown * 1e-3

    def step(self, text: str) -> int:
        depth = self.controller.choose(self.context, requests=[self.request])
        accepted = 0
        while accepted < depth - 1 and self.chance.random() < TEXTS[text][accepted]:
            accepted += 1
        self.controller.observe(
            self.context,
            1,
            depth,
            [accepted],
            self.disturbed(self.machine.draft(depth)),
            self.disturbed(self.machine.verify[depth - 1]),
            [self.request],
        )
        self.depths.append(depth)
        return depth

    def steps(self, text: str, count: int) -> list[int]:
        return [self.step(text) for _ in range(count)]

    def worth(self, text: str, depths: Sequence[int]) -> float:
        """Expected tokens per millisecond of steps of these depths."""
        tokens = sum(expected_tokens(TEXTS[text], depth) for depth in depths)
        return tokens / sum(self.machine.step(depth) for depth in depths)


# Simulations


@pytest.mark.parametrize("text", ["easy", "medium", "hard", "uneven"])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_it_is_as_good_as_the_best_fixed_depth_but_for_three_percent(
    machine: Machine, text: str
) -> None:
    best = rate(machine, text, best_depth(machine, text))
    shares = []
    for seed in range(3):
        run = Run(machine, seed)
        run.steps(text, 150)
        shares.append(run.worth(text, run.steps(text, 1000)) / best)
    assert sum(shares) / len(shares) > 0.97


@pytest.mark.parametrize("machine", [*MACHINES.values(), NATIVE], ids=[*MACHINES, "native"])
def test_hopeless_text_costs_little_more_than_no_speculation(machine: Machine) -> None:
    dense = rate(machine, "hopeless", 1)
    run = Run(machine, seed=5)
    start = run.steps("hopeless", 150)
    assert run.worth("hopeless", run.steps("hopeless", 2000)) > 0.985 * dense
    # What is lost before it has given up, in dense steps' time.
    lost = sum(machine.step(d) / machine.step(1) - expected_tokens((0.02,) * 6, d) for d in start)
    assert lost < 45


MIX = (("easy", 400), ("hopeless", 150), ("medium", 300), ("hard", 150))


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_text_that_switches_is_faster_than_at_any_fixed_depth(machine: Machine) -> None:
    segments = MIX * 3
    fixed = {
        depth: sum(tokens / rate(machine, text, depth) for text, tokens in segments)
        for depth in range(1, MAX_DEPTH + 1)
    }
    run = Run(machine, seed=2)
    adaptive = 0.0
    for text, tokens in segments:
        made = 0.0
        while made < tokens:
            depth = run.step(text)
            made += expected_tokens(TEXTS[text], depth)
            adaptive += machine.step(depth)
    assert adaptive < min(fixed.values())


def test_it_recovers_when_text_becomes_easy_again_and_gives_up_when_it_does_not() -> None:
    machine = MACHINES["cpu, 64K"]
    run = Run(machine, seed=1)
    run.steps("easy", 200)
    run.steps("hopeless", 60)
    assert Counter(run.steps("hopeless", 40))[1] > 30
    run.steps("hopeless", 1500)
    run.steps("easy", 120)
    best = rate(machine, "easy", best_depth(machine, "easy"))
    assert run.worth("easy", run.steps("easy", 200)) > 0.95 * best


def test_it_stays_below_a_jump_of_the_verify() -> None:
    machine = MACHINES["gpu, verify jumps at 5"]
    assert best_depth(machine, "medium") == 4
    run = Run(machine, seed=3)
    run.steps("medium", 150)
    used = Counter(run.steps("medium", 1000))
    assert used.most_common(1)[0][0] == 4
    assert used[5] + used[6] + used[7] < 60


def test_a_jump_that_pays_is_taken() -> None:
    """The depths just above the jump are worse than those below it, the deepest is better."""
    machine = Machine(tuple(10.0 + (4.0 if d >= 4 else 0.0) for d in range(1, 8)), 0.0, 0.5)
    alphas = (0.97,) * 6
    TEXTS["very easy"] = alphas
    rates = [rate(machine, "very easy", d) for d in range(1, 8)]
    assert rates[3] < rates[2] < rates[6]
    run = Run(machine, seed=4)
    run.steps("very easy", 150)
    assert Counter(run.steps("very easy", 300)).most_common(1)[0][0] == 7


def test_a_machine_that_slows_down_does_not_change_the_choice() -> None:
    run = Run(MACHINES["gpu, verify jumps at 5"], seed=6)
    run.steps("medium", 400)
    run.slowdown = 2.5
    used = Counter(run.steps("medium", 200))
    assert used[4] > 150


# What it promises


def noiseless(machine: Machine, text: str, steps: int = 300) -> Run:
    run = Run(machine, noise=0.0)
    run.steps(text, steps)
    return run


def test_the_first_steps_measure_both_ends_and_start_at_the_deepest() -> None:
    run = Run(MACHINES["cpu, 64K"])
    assert run.steps("easy", 4) == [7, 7, 1, 1]


def test_a_depth_is_always_within_its_bounds() -> None:
    chance = random.Random(0)
    for max_depth in (2, 3, 9):
        controller = DepthController(max_depth)
        seen = set()
        for _ in range(400):
            context, batch = chance.choice([3, 900, 70_000]), chance.choice([1, 2, 5])
            depth = controller.choose(context, batch)
            assert 1 <= depth <= max_depth
            seen.add(depth)
            accepted = [chance.randrange(depth) for _ in range(batch)]
            seconds = chance.random() * 1e-2
            controller.observe(context, batch, depth, accepted, seconds, seconds)
        assert len(seen) > 1


def test_below_min_context_the_depth_is_fixed() -> None:
    controller = DepthController(MAX_DEPTH, min_context=4096)
    for _ in range(50):
        assert controller.choose(4095) == MAX_DEPTH
        controller.observe(4095, 1, MAX_DEPTH, [0], 0.005, 0.005)
    chosen = []
    for _ in range(50):
        depth = controller.choose(4096)
        chosen.append(depth)
        controller.observe(4096, 1, depth, [0], 0.001 * (depth - 1), 0.005)
    assert chosen.count(1) > 30


def test_the_same_observations_give_the_same_depths_also_after_pickling() -> None:
    run, same = (Run(MACHINES["cpu, 64K"], seed=8) for _ in range(2))
    assert run.steps("medium", 200) == same.steps("medium", 200)
    copy = pickle.loads(pickle.dumps(run))
    assert copy.steps("hard", 200) == run.steps("hard", 200)


def test_asking_twice_changes_nothing() -> None:
    run, asked = (Run(MACHINES["cpu, 64K"], seed=9) for _ in range(2))
    for _ in range(300):
        asked.controller.choose(CONTEXT, requests=[asked.request])
        assert asked.step("medium") == run.step("medium")


def test_a_batch_takes_the_depth_that_is_best_for_its_sum() -> None:
    machine = MACHINES["gpu, verify jumps at 5"]
    run = noiseless(machine, "medium", 600)
    estimates = {}
    for text in ("easy", "hopeless", "hard"):
        estimates[text] = AcceptanceEstimate(MAX_DEPTH)
        chance = random.Random(text)
        for _ in range(4000):
            accepted = 0
            while accepted < 6 and chance.random() < TEXTS[text][accepted]:
                accepted += 1
            estimates[text].observe(6, accepted)
    run.controller._step = 0  # nothing waits for a probe
    run.controller._last_step_at = [0] * MAX_DEPTH
    choices = []
    for texts in (["easy"], ["hopeless"], ["easy", "hopeless"], ["easy"] + ["hopeless"] * 7):
        requests = [estimates[text] for text in texts]
        alphas = [estimate.alphas() for estimate in requests]
        wanted = max(
            range(1, MAX_DEPTH + 1),
            key=lambda d: sum(expected_tokens(a, d) for a in alphas) / machine.step(d),
        )
        run.controller._again = None
        assert run.controller.choose(CONTEXT, 1, requests) == wanted
        choices.append(wanted)
    assert choices[0] > choices[3] >= choices[1]


def test_bad_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="depth 2"):
        DepthController(1)
    with pytest.raises(ConfigError, match="min_context -1"):
        DepthController(7, min_context=-1)


# Acceptance


def test_estimates_follow_the_text() -> None:
    for text in ("easy", "hard"):
        run = noiseless(MACHINES["cpu, 64K"], "medium", 10)
        estimate, chance = run.controller.new_request(), random.Random(3)
        means = [0.0] * 6
        for step in range(600):
            accepted = 0
            while accepted < 6 and chance.random() < TEXTS[text][accepted]:
                accepted += 1
            estimate.observe(6, accepted)
            if step >= 100:
                means = [m + a / 500 for m, a in zip(means, estimate.alphas(), strict=True)]
        assert means[0] == pytest.approx(TEXTS[text][0], abs=0.03)
        assert means[1] == pytest.approx(TEXTS[text][1], abs=0.06)


def test_by_hand_after_one_step() -> None:
    estimate = AcceptanceEstimate(4)
    estimate.observe(drafted=3, accepted=1)
    # The long-run share: four trials' worth of 0.8 and one success. It counts for three trials.
    anchor = 0.8 + 0.2 / 5
    first = (1 + 3 * anchor) / 4
    second = (0 + 0.95 * first) / 2  # tried and refused
    third = 0.95 * second  # not reached
    assert estimate.long_run == pytest.approx(anchor)
    assert estimate.alphas() == pytest.approx([first, second, third])
    tokens = [1, 1 + first, 1 + first + first * second, 1 + first + first * second * (1 + third)]
    assert estimate.expected_tokens == pytest.approx(tokens)


def test_a_position_not_tried_returns_to_the_one_before_it() -> None:
    estimate = AcceptanceEstimate(3)
    for _ in range(50):
        estimate.observe(drafted=2, accepted=1)
    assert estimate.alphas()[1] < 0.1
    for _ in range(200):
        estimate.observe(drafted=1, accepted=1)
    assert estimate.alphas()[1] > 0.85


def test_steps_without_drafts_do_not_make_hopeless_text_look_better() -> None:
    estimate = AcceptanceEstimate(7)
    for _ in range(60):
        estimate.observe(drafted=6, accepted=0)
    for _ in range(1000):
        estimate.observe(drafted=0, accepted=0)
    assert estimate.alphas()[0] < 0.15


def test_a_new_request_is_taken_to_be_like_the_ones_before() -> None:
    controller = DepthController(MAX_DEPTH)
    before = controller.new_request().alphas()[0]
    for _ in range(300):
        controller.observe(CONTEXT, 4, 7, [0, 0, 0, 0], 0.005, 0.005)
    assert controller.new_request().alphas()[0] < 0.1 < before


# Costs


def test_a_line_by_hand() -> None:
    fit = fit_line([1, 2, 3], [3.0, 5.0, 7.0])
    assert (fit.intercept, fit.slope, fit.r_squared) == pytest.approx((1.0, 2.0, 1.0))
    uneven = fit_line([0, 1, 2], [0.0, 3.0, 3.0])  # 2 of 6 squared units left over 6
    assert (uneven.intercept, uneven.slope) == pytest.approx((0.5, 1.5))
    assert uneven.r_squared == pytest.approx(0.75)
    assert fit_line([2, 2], [3.0, 5.0]).at(3) == pytest.approx(6.0)  # through the origin
    assert fit_line([1, 2, 9], [1.0, 2.0, 0.0], [1, 1, 0]).slope == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no points"):
        fit_line([], [])


def test_times_not_tried_move_with_those_that_are() -> None:
    times = LevelledTimes(2)
    for _ in range(20):
        times.observe(0, 0.010)
        times.observe(1, 0.015)
    for _ in range(20):
        times.observe(0, 0.030)
    assert times.seconds(0) == pytest.approx(0.030, rel=0.02)
    assert times.seconds(1) == pytest.approx(0.045, rel=0.20)


def test_one_disturbance_moves_a_time_little_and_a_slow_first_one_is_forgotten() -> None:
    times = LevelledTimes(1)
    for seconds in [0.010] * 10 + [0.500]:
        times.observe(0, seconds)
    assert times.seconds(0) < 0.0115
    first = LevelledTimes(2)
    first.observe(0, 0.010)
    for seconds in (0.080, 0.020, 0.020):
        first.observe(1, seconds)
    assert first.seconds(1) == pytest.approx(0.020, rel=0.1)


def test_times_do_not_drift_apart_in_the_long_run() -> None:
    """Size 1 is hardly ever tried; its estimate must not wander with size 0's noise."""
    chance = random.Random(2)
    times = LevelledTimes(2)
    for step in range(20_000):
        size = 1 if step < 4 or step % 500 == 0 else 0
        spike = 2.0 if chance.random() < 0.02 else 1.0
        times.observe(size, (0.01, 0.014)[size] * spike * (1 + chance.gauss(0, 0.05)))
    assert times.seconds(1) / times.seconds(0) == pytest.approx(1.4, rel=0.06)


def observed(steps: Sequence[tuple[int, float, float]], repeats: int = 3) -> StepTimes:
    times = StepTimes(MAX_DEPTH)
    for _ in range(repeats):
        for depth, draft_s, verify_s in steps:
            times.observe(depth, draft_s, verify_s)
    return times


def test_a_draft_of_untried_length_is_on_the_line() -> None:
    times = observed([(3, 0.005, 0.01), (7, 0.013, 0.01)])  # t_ctx 1 ms, t_fwd 2 ms
    assert times.draft_seconds() == pytest.approx(
        [0.0, 0.003, 0.005, 0.007, 0.009, 0.011, 0.013], rel=0.01
    )
    only = observed([(7, 0.012, 0.01)])
    assert only.draft_seconds()[1:] == pytest.approx([0.002 * n for n in range(1, 7)], rel=1e-3)


def test_a_verify_of_untried_depth_costs_the_least_that_it_can() -> None:
    times = observed([(7, 0.0, 0.020), (1, 0.0, 0.010)])
    assert times.verify_seconds() == pytest.approx([0.010] * 6 + [0.020], rel=1e-3)
    times = observed([(7, 0.0, 0.020), (1, 0.0, 0.010), (4, 0.0, 0.012)])
    assert times.verify_seconds() == pytest.approx([0.010] * 3 + [0.012] * 3 + [0.020], rel=1e-3)
    assert times.measured(4)
    assert not times.measured(5)


def test_negative_parts_of_a_draft_do_not_exist() -> None:
    steep = observed([(2, 0.001, 0.01), (3, 0.009, 0.01)]).draft_line()
    assert steep.intercept == 0.0
    falling = observed([(2, 0.009, 0.01), (7, 0.001, 0.01)]).draft_line()
    assert falling.slope == 0.0
    assert falling.intercept > 0


def test_a_new_length_starts_from_the_nearest_one_and_corrects_its_level() -> None:
    model = CostModel(MAX_DEPTH)
    for _ in range(10):
        model.observe(65_536, 1, 1, 0.0, 0.010)
        model.observe(65_536, 1, 7, 0.006, 0.014)
        model.observe(1_000, 1, 7, 0.006, 0.002)
    model.observe(140_000, 1, 7, 0.006, 0.028)
    assert model.at(140_000, 1).verify_seconds()[0] == pytest.approx(0.020, rel=0.05)
    assert model.at(140_000, 1).measured(1)
    assert model.at(65_536, 1).verify_seconds()[6] == pytest.approx(0.014, rel=0.01)
    assert not model.at(1_000, 1).measured(1)


def test_batches_have_times_of_their_own() -> None:
    model = CostModel(MAX_DEPTH)
    for batch, seconds in ((1, 0.010), (8, 0.040)):
        for _ in range(3):
            model.observe(1_000, batch, 7, 0.001, seconds)
    assert model.at(1_000, 1).verify_seconds()[6] == pytest.approx(0.010, rel=0.01)
    assert model.at(1_000, 8).verify_seconds()[6] == pytest.approx(0.040, rel=0.01)


def test_a_clock_that_stands_still_is_no_error() -> None:
    controller = DepthController(MAX_DEPTH)
    for _ in range(20):
        depth = controller.choose(10)
        controller.observe(10, 1, depth, [0], 0.0, 0.0)
