"""Moment: what a device is computing right now, for operators that must know.

An operator that normalises over, or draws masks for, a whole minibatch has to know which samples of it the device holds
and which step it is. The executor keeps one `Moment` up to date; the functions that replace such operators read it.
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Moment:
    """The forward that is running. One a device; changed only by the executor."""

    batch: int
    """Samples of a whole minibatch."""
    step: int = 0
    minibatch: int = 0
    start: int = 0
    """First sample that the device holds."""
    stop: int = 0
    """One past the last."""
