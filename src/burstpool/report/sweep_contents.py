"""What a sweep's report is made from, in the report's own words; `sweeping/outcome.py` fills it in.

A background array in the report of its foreground is drawn from the same curves, its members for trials.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCurve:
    """One trial."""

    number: int
    name: str
    """What it is called when pointed at, with its settings."""
    settings: Mapping[str, str]
    state: str
    losses: tuple[float, ...]
    """Training loss of each step."""
    reports: tuple[tuple[int, float], ...]
    """(step, objective)."""
    reason: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepContents:
    """All that a sweep's report shows."""

    job: str
    search: str
    objective: str
    """In words."""
    trials: tuple[TrialCurve, ...]
    """By number."""
    best: int | None
    samples_per_s: float | None
    """Over all trials."""
    serial_samples_per_s: float
    """One after another, estimated."""
    num_arrays: int
    wall_time_s: float
    apart: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Trials that could not be fused with those before, and why."""
    details: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    made_by: str = "Burstpool"
