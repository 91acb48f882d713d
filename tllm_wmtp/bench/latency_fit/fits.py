"""The lines of one arm and context, and the same quantities by the runtime's own timers.

The model's step is ``t_verify + t_ctx + gamma * t_fwd``, so a line through steps has the slope
``t_fwd`` where the verify costs the same at every depth. Where each row that is verified costs
something, as on a CPU, the slope is ``t_fwd`` and that cost. The phases are therefore fitted as
well: the line of the draft phase is ``t_ctx + gamma * t_fwd`` whatever the verify does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from tllm_wmtp.bench.latency_fit.regression import (
    Estimate,
    FittedLine,
    coefficients,
    fit_straight,
    fit_with_jump,
    line_json,
)
from tllm_wmtp.bench.latency_fit.repetitions import Rounds, Sweep, Timers, estimate, medians


class ArmFit:
    """Lines and timers of one sweep; all times in ms."""

    def __init__(self, sweep: Sweep):
        self.sweep = sweep
        self.step = self._fit(sweep.step_ms, fit_with_jump)
        self.draft = self._fit(sweep.draft_ms, fit_straight)
        self.verify = self._fit(sweep.verify_ms, fit_with_jump)

    @cached_property
    def fwd(self) -> Estimate:
        return estimate(self.sweep.rounds, lambda rounds: self.sweep.timers(rounds).fwd_ms)

    @cached_property
    def ctx(self) -> Estimate:
        return estimate(self.sweep.rounds, lambda rounds: self.sweep.timers(rounds).ctx_ms)

    def json(self) -> dict[str, Any]:
        return {
            "arm": self.sweep.arm,
            "context": self.sweep.context,
            "gammas": list(self.sweep.gammas),
            **line_json(self.step),
            "draft": line_json(self.draft),
            "verify": line_json(self.verify),
            "timers": {
                "t_fwd_ms": self.fwd.value,
                "t_fwd_ms_interval": self.fwd.interval,
                "t_ctx_ms": self.ctx.value,
                "t_ctx_ms_interval": self.ctx.interval,
            },
            "agreement": self.agreement(),
        }

    def agreement(self) -> list[dict[str, Any]]:
        """Fitted quantities next to what the timers say of the same repetitions."""
        return [
            self._compare(
                "draft slope = t_fwd",
                self.draft.slope,
                lambda rounds: self._line(self.sweep.draft_ms, rounds)[1],
                lambda _, timers: timers.fwd_ms,
            ),
            self._compare(
                "draft intercept = t_ctx",
                self.draft.intercept,
                lambda rounds: self._line(self.sweep.draft_ms, rounds)[0],
                lambda _, timers: timers.ctx_ms,
            ),
            self._compare(
                "step slope = t_fwd + slope of the verify",
                self.step.slope,
                lambda rounds: self._line(self.sweep.step_ms, rounds)[1],
                lambda rounds, timers: timers.fwd_ms + self._line(self.sweep.verify_ms, rounds)[1],
            ),
            self._compare(
                "step intercept = t_ctx + intercept of the verify",
                self.step.intercept,
                lambda rounds: self._line(self.sweep.step_ms, rounds)[0],
                lambda rounds, timers: timers.ctx_ms + self._line(self.sweep.verify_ms, rounds)[0],
            ),
        ]

    def _compare(
        self,
        quantity: str,
        fitted: Estimate,
        fit: Callable[[Rounds], float],
        timed: Callable[[Rounds, Timers], float],
    ) -> dict[str, Any]:
        """The difference's interval resamples both from the same repetitions. They agree if the
        fit's interval and the timers' have a value in common."""

        def by_timers(rounds: Rounds) -> float:
            return timed(rounds, self.sweep.timers(rounds))

        rounds = self.sweep.rounds
        timers = estimate(rounds, by_timers)
        difference = estimate(rounds, lambda some: fit(some) - by_timers(some))
        return {
            "quantity": quantity,
            "fitted_ms": fitted.value,
            "fitted_ms_interval": fitted.interval,
            "timers_ms": timers.value,
            "timers_ms_interval": timers.interval,
            "difference_ms": difference.value,
            "difference_ms_interval": difference.interval,
            "agrees": fitted.overlaps(timers),
        }

    def _fit(
        self,
        times: dict[int, list[float]],
        fit: Callable[[tuple[int, ...], list[float]], FittedLine],
    ) -> FittedLine:
        return fit(self.sweep.gammas, medians(times, self.sweep.rounds))

    def _line(self, times: dict[int, list[float]], rounds: Rounds) -> tuple[float, ...]:
        """Intercept and slope under the model of the step's fit, with its jump or without."""
        jump = self.step.jump if times is not self.sweep.draft_ms else None
        place = None if jump is None else jump.x
        return coefficients(self.sweep.gammas, medians(times, rounds), place)
