"""Sharing on a kind of device: what is asked, what comes of it, and who does it.

One implementation a kind of device behind one function; `find` looks it up. A foreground trains by its plan, background
jobs train in what it leaves, all for real. Guarantees of every implementation: the losses of all jobs are those they
have alone with the same seeds; nothing a background does can fail or stall the foreground; no process is left behind.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from burstpool.errors import ShareError
from burstpool.share.budget import Budget, Gap

if TYPE_CHECKING:
    from burstpool.plan.inputs import PlanInputs
    from burstpool.plan.plan import Plan
    from burstpool.report.timeline import Timeline
    from burstpool.run.options import RunOptions

IMPLEMENTATIONS: dict[str, str] = {
    "cpu": "burstpool.share.cpu:share_on_cpu",
    "cuda": "burstpool.share.cuda:share_on_cuda",
}
"""Kind of device → `module:function`, loaded when it is asked for."""
BACKGROUND = "background"
"""In the run folder, where background i has its own, called `i`."""
ENDLESS = 1_000_000_000
"""Steps of a background that has no end of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """A background job: one job, or several settings of it as one fused array."""

    source: str
    settings: tuple[Mapping[str, Any], ...] = ({},)
    """One for each member; more than one make an array."""
    steps: int = ENDLESS
    """At which step it ends, if the foreground does not end before."""
    memory_bytes: int | None = None
    """What it may allocate; None for a share of what the machine has free."""
    lowest_priority: bool = True
    """Whether the kernel runs it only where nothing else wants to run; if not, the controller alone holds it back."""

    @property
    def name(self) -> str:
        """How reports call it."""
        many = f" ×{len(self.settings)}" if len(self.settings) > 1 else ""
        return Path(self.source.removeprefix("zoo:")).stem + many


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRequest:
    """What to share."""

    foreground: str
    """`job.py` or `zoo:NAME`."""
    settings: Mapping[str, Any]
    plan: "Plan"
    steps: int
    """Of the foreground; background jobs end with it."""
    backgrounds: tuple[Background, ...]
    """The i-th runs on device i, counted round."""
    budget: Budget
    options: "RunOptions"
    run_folder: Path
    inputs: "PlanInputs | None" = None
    gaps: tuple[Gap, ...] = ()
    """Of a device in a step of the foreground, as simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareProgress:
    """How it stands, for a live view."""

    step: int
    steps: int
    samples_per_s: float
    slowdown: float | None
    """Of the last steps; None while the base is being measured."""
    background_steps: int
    background_steps_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundOutcome:
    """What became of one background job."""

    name: str
    device: int
    steps: int
    """Trained while the foreground did."""
    kept: float | None
    """Its speed then over its speed alone; None where the latter could not be measured."""
    alone_step_s: float | None
    state: str
    """`ended`, `failed` for good, or `evicted` for want of memory and not back when the foreground ended."""
    reason: str
    restarts: int
    evictions: int
    losses: list[Any]
    """By step; for an array one number a member."""
    multiprocessors: float = 1.0
    """Share of the GPU's that it was confined to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOutcome:
    """What came of it."""

    folder: Path
    losses: tuple[float, ...]
    """The foreground's."""
    step_time_s: float
    slowdown: float
    """Mean step since the first shared one, over the mean of those that ran alone in between."""
    slowdown_p95: float | None
    """The p95 step over the same."""
    alone_p95: float | None
    """The p95 of the steps that ran alone: the foreground's own noise."""
    alone_step_s: float | None
    backgrounds: tuple[BackgroundOutcome, ...]
    timeline: "Timeline | None" = field(repr=False)

    @property
    def background_steps(self) -> int:
        """Of all background jobs, while the foreground trained."""
        return sum(background.steps for background in self.backgrounds)

    @property
    def background_kept(self) -> float | None:
        """Mean over the background jobs."""
        known = [background.kept for background in self.backgrounds if background.kept is not None]
        return sum(known) / len(known) if known else None


class ShareFunction(Protocol):
    """Shares devices of one kind."""

    def __call__(
        self, request: ShareRequest, *, observer: Callable[[ShareProgress], None] | None = None
    ) -> ShareOutcome:
        """Runs until the foreground has ended; raises RunError if the foreground fails, never for a background."""
        ...


def background_path(run_folder: Path, number: int) -> Path:
    """The folder of background `number`; `results.py` says what is in it."""
    return run_folder / BACKGROUND / str(number)


def refuse_used(folder: Path) -> None:
    """Before anything is written: a folder that holds a run, or a part of one, keeps it.

    Sharing does not go on with a run, and a background would go on from a checkpoint that it found.
    """
    from burstpool.run.folder import RunFolder

    run = RunFolder(folder)
    if found := next((path for path in (run.record, folder / BACKGROUND, run.checkpoints) if path.exists()), None):
        raise ShareError(f"{folder} holds a run already ({found.name}); choose another --run-folder")


def refuse_fp16(options: "RunOptions") -> None:
    """Steps whose outcome the host must look at cannot be queued, nor are arrays' losses scaled here."""
    if options.autocast == "fp16":
        raise ShareError("with fp16 the host decides after each step what to do; share with bf16 or without autocast")


def find(device: str) -> ShareFunction:
    """The implementation for a kind of device."""
    if device not in IMPLEMENTATIONS:
        raise ShareError(f"sharing on {device!r} is not there; pass --device {' or '.join(IMPLEMENTATIONS)}")
    module, _, name = IMPLEMENTATIONS[device].partition(":")
    found: ShareFunction = getattr(importlib.import_module(module), name)
    return found
