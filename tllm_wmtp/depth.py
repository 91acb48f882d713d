"""How deep to speculate, decided before each step from what was accepted and what steps cost.

A step of depth d drafts d - 1 tokens and emits between 1 and d; depth 1 is a plain decoding step.
The controller takes the depth with the most expected tokens per second,

    E[tokens(d)] / t_step(d),   E[tokens(d)] = 1 + sum_{j<d} prod_{k<=j} alpha_k,

over the batch's requests together: one more draft pays while its share of a token, the product of
the alphas, is worth more than its forward and its row of the verify. All depths are compared, not
neighbours only, because t_step jumps where the verify changes its kernel. Depth changes the speed
and never the output. The paper (arXiv 2607.21535) finds that the best depth varies, often 3 or 5
where 7 is set, and leaves its choice open.

What keeps the estimates alive although only one depth is tried per step:

- alphas are forgotten within some steps, and one that was not tried lately is taken to be almost
  that of the position before it, so a depth that was given up is tried again;
- the time of an untried depth is the least it can be (:mod:`tllm_wmtp.latency`);
- probes: with at most ``PROBE_SHARE`` of the time, steps are made at another depth. Without them,
  depth 1 would be final, for it learns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.latency import CostModel

#: Steps after which a draft position's trials weigh 1/e.
MEMORY_STEPS = 25
#: The same for the first position's long-run share, in trials.
ANCHOR_TRIALS = 200
#: What the first position is taken for before any trial, and the trials that this counts for.
FIRST_ALPHA, FIRST_TRIALS = 0.8, 4.0
#: Trials that the prior of the first and of a later position counts for, and how much less than the
#: position before a later one is taken for: acceptance falls slowly along a step's drafts.
FIRST_PRIOR_TRIALS, PRIOR_TRIALS, FALL = 3.0, 1.0, 0.95
#: Most of the time that probes may lose, and how much of it can be saved up or owed, in steps.
PROBE_SHARE, PROBE_STEPS_SAVED = 0.01, 1.5
#: Steps after which a probe may be made: of a neighbour of the best depth; of any depth. A step's
#: times may have changed, or were learned while the machine was disturbed.
PROBE_NEAR_AFTER, PROBE_FAR_AFTER = 8, 256


class AcceptanceEstimate:
    """Running ``alpha_1 .. alpha_{max_depth - 1}`` of one request, or of an engine's all together.

    ``alpha_j`` is the share of the steps that reached draft j and accepted it. Counts are forgotten
    by steps, tried or not, and mix with a prior: for j > 1 nearly the estimate of the position
    before, for the first position its own long-run share.
    """

    def __init__(self, max_depth: int, first_alpha: float = FIRST_ALPHA):
        self._accepted = [0.0] * (max_depth - 1)
        self._trials = [0.0] * (max_depth - 1)
        self._anchor, self._anchor_trials = first_alpha, FIRST_TRIALS
        self._expected: list[float] | None = None

    def observe(self, drafted: int, accepted: int) -> None:
        """One step: its first ``accepted`` of ``drafted`` drafts were right."""
        keep = 1 - 1 / MEMORY_STEPS
        for j in range(len(self._trials)):
            self._trials[j] *= keep
            self._accepted[j] *= keep
        for j in range(min(drafted, accepted + 1)):
            self._trials[j] += 1
            self._accepted[j] += accepted > j
        if drafted > 0:
            self._anchor_trials = min(self._anchor_trials + 1, ANCHOR_TRIALS)
            self._anchor += ((accepted > 0) - self._anchor) / self._anchor_trials
        self._expected = None

    @property
    def long_run(self) -> float:
        """``alpha_1`` over many more steps than the others remember."""
        return self._anchor

    def alphas(self) -> list[float]:
        prior, weight, rates = self._anchor, FIRST_PRIOR_TRIALS, []
        for accepted, trials in zip(self._accepted, self._trials, strict=True):
            rate = (accepted + weight * prior) / (trials + weight)
            rates.append(rate)
            prior, weight = FALL * rate, PRIOR_TRIALS
        return rates

    @property
    def expected_tokens(self) -> list[float]:
        """Tokens that a step is expected to emit, entry ``depth - 1`` for depths 1 .. max_depth."""
        if self._expected is None:
            self._expected = self._expect()
        return self._expected

    def _expect(self) -> list[float]:
        total, product = 1.0, 1.0
        expected = [total]
        for alpha in self.alphas():
            product *= alpha
            total += product
            expected.append(total)
        return expected


@dataclass
class _Plan:
    """What was chosen, what is best, and the seconds that the choice is expected to lose."""

    depth: int
    best: int
    regret_s: float


class DepthController:
    """Chooses the depth of every step of one engine; one thread.

    Args:
        max_depth: the deepest step, the one that rings and buffers are sized for; also the depth of
            the first steps and of contexts below ``min_context``.
        min_context: below so many tokens the depth stays ``max_depth``. The default 0 is right
            wherever steps are measured, because times are kept per context length; raise it where
            short contexts must run at a fixed depth, as for a graph that was captured for one.

    ``context_tokens`` is the mean length of the batch's requests. ``requests`` are the estimates
    of the batch's requests in order, made by :meth:`new_request`; without them every request is
    taken to be like the engine's recent ones.
    """

    def __init__(self, max_depth: int, min_context: int = 0):
        if max_depth < 2:
            raise ConfigError(
                f"adaptive depth up to {max_depth}",
                "there is nothing to choose below depth 2",
                "raise depth, or turn adaptive depth off",
            )
        if min_context < 0:
            raise ConfigError(
                f"min_context {min_context}", "a context is not negative", "use 0 or more"
            )
        self.max_depth, self.min_context = max_depth, min_context
        self.costs = CostModel(max_depth)
        self.acceptance = AcceptanceEstimate(max_depth)
        self._step = 0
        self._last_step_at = [0] * max_depth
        self._savings_s = 0.0
        self._again: int | None = None
        self._plan: _Plan | None = None

    def new_request(self) -> AcceptanceEstimate:
        """The estimate of a request that is like the engine's others as far as anyone knows."""
        return AcceptanceEstimate(self.max_depth, self.acceptance.long_run)

    def choose(
        self, context_tokens: int, batch: int = 1, requests: Sequence[AcceptanceEstimate] = ()
    ) -> int:
        """The depth of the next step, 1 .. max_depth; 1 drafts nothing."""
        self._plan = None
        if context_tokens < self.min_context:
            return self.max_depth
        times = self.costs.at(context_tokens, batch)
        for end in (self.max_depth, 1):  # the other depths' times lie between these two
            if not times.measured(end):
                return end
        self._plan = self._planned(self._expected(batch, requests), times.seconds)
        return self._plan.depth

    def observe(
        self,
        context_tokens: int,
        batch: int,
        depth: int,
        accepted: Sequence[int],
        draft_s: float,
        verify_s: float,
        requests: Sequence[AcceptanceEstimate] = (),
    ) -> None:
        """The step that was made: drafts accepted per request, and its seconds."""
        self.costs.observe(context_tokens, batch, depth, draft_s, verify_s)
        for index, count in enumerate(accepted):
            self.acceptance.observe(depth - 1, count)
            if requests:
                requests[index].observe(depth - 1, count)
        self._step += 1
        self._last_step_at[depth - 1] = self._step
        self._account(depth, accepted, draft_s + verify_s)

    def _expected(self, batch: int, requests: Sequence[AcceptanceEstimate]) -> list[float]:
        if not requests:
            return [batch * tokens for tokens in self.acceptance.expected_tokens]
        return [sum(tokens) for tokens in zip(*(r.expected_tokens for r in requests), strict=True)]

    def _planned(self, expected: list[float], seconds: list[float]) -> _Plan:
        rates = [tokens / second for tokens, second in zip(expected, seconds, strict=True)]
        best = max(range(self.max_depth), key=rates.__getitem__)
        regrets = [s - e / rates[best] for e, s in zip(expected, seconds, strict=True)]
        best_plan = _Plan(best + 1, best + 1, 0.0)
        if self._again is not None and self._again > best:
            owed = PROBE_STEPS_SAVED * seconds[best]
            if regrets[self._again] <= self._savings_s + owed:
                return _Plan(self._again + 1, best + 1, regrets[self._again])
        waiting = [index for index in range(self.max_depth) if self._is_waiting(index, best)]
        if not waiting:
            return best_plan
        probe = min(waiting, key=regrets.__getitem__)
        if regrets[probe] > self._savings_s:
            return best_plan
        return _Plan(probe + 1, best + 1, regrets[probe])

    def _is_waiting(self, index: int, best: int) -> bool:
        limit = PROBE_NEAR_AFTER if abs(index - best) == 1 else PROBE_FAR_AFTER
        return index != best and self._step - self._last_step_at[index] >= limit

    def _account(self, depth: int, accepted: Sequence[int], step_s: float) -> None:
        plan, self._plan = self._plan, None
        if plan is None or plan.depth != depth:
            return
        saved = self._savings_s + PROBE_SHARE * step_s
        self._savings_s = min(saved, PROBE_STEPS_SAVED * step_s) - plan.regret_s
        # A deeper probe that went well is repeated at once: one success alone may be luck.
        went_well = plan.depth > plan.best and min(accepted, default=0) >= depth - 1
        self._again = depth - 1 if went_well else None
