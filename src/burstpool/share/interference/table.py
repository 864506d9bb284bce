"""The interference table: how much kinds of layers slow each other down when they share a device.

Holds, for pairs of a foreground's and a background's kind of layer, the foreground's slowdown and the share of its own
speed that the background keeps while both run all the time. The same on every kind of device; whoever measures fills
it. A pair that was not measured is filled in from those that were, by one *sensitivity* a foreground kind and one
*pressure* a background kind: slowdown - 1 = sensitivity · pressure. Ignores: sizes of layers, more than two jobs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from burstpool.artifact import STRICT, Artifact
from burstpool.errors import ArtifactError, ShareError
from burstpool.profiling.profile import Profile

COMMUNICATION = "communication"
KINDS = ("convolution", "linear", "attention", "recurrent", "pointwise", "optimizer", COMMUNICATION)
"""What layers are told apart by; the last one only a foreground has."""
_OPERATORS = (
    ("convolution", ("conv",)),
    ("recurrent", ("lstm", "gru", "rnn")),
    ("attention", ("attention",)),
    ("linear", ("linear", "matmul", "mm", "embedding")),
)
"""Kind → what its operators' names hold, the heaviest first; anything else is pointwise."""
_ROUNDS = 50
_HARMLESS = 1.01
"""Background work that slows communication down by no more may run in an exposed all-reduce."""


def kind_of(operators: str) -> str:
    """The kind of a layer with these operators: `"conv2d+relu"` is a convolution."""
    return next((kind for kind, names in _OPERATORS if any(name in operators for name in names)), "pointwise")


def mix_of(profile: Profile, batch: int) -> dict[str, float]:
    """Kind → its part of a step's compute at this batch, 0 to 1."""
    seconds: dict[str, float] = {}
    for row in profile.rows(batch):
        kind = kind_of(row.kind)
        seconds[kind] = seconds.get(kind, 0.0) + row.forward_s + row.backward_s
    total_s = sum(seconds.values())
    return {kind: spent_s / total_s for kind, spent_s in seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What two kinds of layers do to each other."""

    __pydantic_config__ = STRICT

    foreground: str
    background: str
    slowdown: float
    """Of the foreground, over its time alone."""
    kept: float
    """The background's speed over its speed alone."""

    def __post_init__(self) -> None:
        if not self.slowdown > 0 or not self.kept >= 0:
            raise ShareError(f"{self} cannot be: slowdown must be more than 0, kept 0 or more")


@dataclass(frozen=True, kw_only=True)
class InterferenceTable(Artifact):
    """Measured pairs on one type of device."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError

    schema_version: int = 1
    device: str
    source: str
    """Who measured, how."""
    pairs: tuple[Pair, ...]

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ArtifactError("an interference table needs at least one pair")
        names = [(pair.foreground, pair.background) for pair in self.pairs]
        if len(set(names)) < len(names):
            raise ArtifactError("a pair is there twice; keep one")

    def of(self, foreground: str, background: str) -> Pair:
        """As measured, else as the other pairs let expect."""
        found = self._known.get((foreground, background))
        if found is not None:
            return found
        sensitivity, pressure = self._factors
        middle = _mean(sensitivity.values()), _mean(pressure.values())
        slowdown = 1 + sensitivity.get(foreground, middle[0]) * pressure.get(background, middle[1])
        kept = _mean(pair.kept for pair in self.pairs)
        return Pair(foreground=foreground, background=background, slowdown=max(slowdown, 1e-6), kept=kept)

    def mixed(self, foreground: Mapping[str, float], background: Mapping[str, float]) -> tuple[float, float]:
        """Slowdown and kept share over all pairs, each as likely as the parts of its kinds (`mix_of`)."""
        total = sum(foreground.values()) * sum(background.values())
        if total <= 0:
            raise ShareError("a job without any compute cannot be shared with; profile it first")
        slowed = kept = 0.0
        for kind, part in foreground.items():
            for other, other_part in background.items():
                pair = self.of(kind, other)
                slowed += part * other_part * pair.slowdown
                kept += part * other_part * pair.kept
        return slowed / total, kept / total

    def harmless_in_reduce(self, background: Mapping[str, float] | None = None) -> bool:
        """Whether background work may run in an exposed all-reduce; of whatever kinds were measured if left out."""
        beside = [pair.background for pair in self.pairs if pair.foreground == COMMUNICATION]
        if background is None and not beside:
            return False
        return self.mixed({COMMUNICATION: 1.0}, background or dict.fromkeys(beside, 1.0))[0] <= _HARMLESS

    @cached_property
    def _known(self) -> dict[tuple[str, str], Pair]:
        return {(pair.foreground, pair.background): pair for pair in self.pairs}

    @cached_property
    def _factors(self) -> tuple[dict[str, float], dict[str, float]]:
        return fit_pressure({key: pair.slowdown - 1 for key, pair in self._known.items()})

    def __str__(self) -> str:
        lines = [f"interference on {self.device} ({self.source})"]
        lines += [
            f"  {p.foreground:<13} beside {p.background:<12} {p.slowdown:>6.2f} slowdown {p.kept:>5.0%} kept"
            for p in self.pairs
        ]
        return "\n".join(lines)


def fit_pressure(added: Mapping[tuple[str, str], float]) -> tuple[dict[str, float], dict[str, float]]:
    """Sensitivity of each first and pressure of each second name, so that their product is nearest to what was added.

    By alternating least squares. Pure and deterministic.
    """
    sensitivity = dict.fromkeys((first for first, _ in added), 1.0)
    pressure = dict.fromkeys((second for _, second in added), 1.0)
    for _ in range(_ROUNDS):
        for name in sensitivity:
            sensitivity[name] = _ratio([(pressure[b], y) for (a, b), y in added.items() if a == name])
        for name in pressure:
            pressure[name] = _ratio([(sensitivity[a], y) for (a, b), y in added.items() if b == name])
    return sensitivity, pressure


def _ratio(points: Sequence[tuple[float, float]]) -> float:
    below = sum(x * x for x, _ in points)
    return sum(x * y for x, y in points) / below if below > 0 else 0.0


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
