"""What the steps of `burstpool demo` share: where they print, what was found so far, where runs are written.

A step is a title and a function of the story; `cli/demo.py` lists them. Each may use what earlier ones have found.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from burstpool.job import Job
    from burstpool.model.traced import TracedModel
    from burstpool.profiling.profile import Profile


@dataclass(slots=True, kw_only=True)
class Story:
    """One telling of the demo."""

    console: Console
    source: str
    """The job: `zoo:tiny_vgg`, `job.py`."""
    settings: dict[str, Any]
    """Its hyper-parameters, where they are not the usual."""
    job: "Job"
    num_devices: int
    """Workers on this machine's cores."""
    steps: int
    """Training steps of each run."""
    num_trials: int
    """Of the sweep."""
    folder: Path
    """Where runs and reports are written."""
    traced: "TracedModel | None" = None
    """Set by the step that traces."""
    profile: "Profile | None" = None
    """Set by the step that measures."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What `--json` prints, by step."""

    def say(self, text: str, *, style: str = "") -> None:
        """Prints text as it is."""
        self.console.print(Text(text, style=style))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One part of the demo."""

    title: str
    """What it shows, in one line; `{job}`, `{num_devices}` and `{num_trials}` stand for the story's."""
    tell: Callable[[Story], None]
    """Does it, prints it, and leaves what it found in the story."""
