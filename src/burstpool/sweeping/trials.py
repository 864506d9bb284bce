"""Trials: what is known of each, and in which state it is.

waiting ─ placed in an array → running ─ reached `until` → paused ─ promoted → waiting
                                 │                            └ the sweep ends → stopped
                                 ├ reached the last step → done
                                 └ its loss is no number, its settings do not work → failed
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from burstpool.artifact import STRICT
from burstpool.run.folder import Setting

TrialState = Literal["waiting", "running", "paused", "stopped", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The objective after so many steps."""

    __pydantic_config__ = STRICT

    step: int
    value: float
    """Lower is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting of the hyper-parameters, and how far it has come."""

    __pydantic_config__ = STRICT

    number: int
    """From 0, in the order in which the search asked for them."""
    settings: Mapping[str, Setting]
    """What the search chose; other hyper-parameters have their defaults."""
    state: TrialState
    until: int
    """The step at which it reports and gives its place free."""
    group: int | None = None
    """Trials of one group can be fused; None where it could not be built."""
    step: int = 0
    """Steps that are done."""
    loss: float | None = None
    """Training loss of the last step; None before the first, and where it was no number."""
    reports: tuple[Report, ...] = ()
    """In the order of steps."""
    reason: str = ""
    """Why it failed."""

    @property
    def value(self) -> float | None:
        """The objective when it was last looked at."""
        return self.reports[-1].value if self.reports else None


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The one with the lowest objective among those that were trained the longest; None where none reported."""
    reported = [trial for trial in trials if trial.reports and trial.state != "failed"]
    if not reported:
        return None
    longest = max(trial.reports[-1].step for trial in reported)
    return min(
        (trial for trial in reported if trial.reports[-1].step == longest),
        key=lambda trial: (trial.reports[-1].value, trial.number),
    )


def described(settings: Mapping[str, Setting]) -> str:
    """`lr=0.03 width=64`."""
    return " ".join(f"{name}={short(value)}" for name, value in settings.items())


def short(value: Setting) -> str:
    """`0.1547`: as many digits as a person reads."""
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
