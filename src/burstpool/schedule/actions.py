"""The Schedule artifact: for each device, an ordered list of actions on blocks of layers.

Every strategy becomes one of these. What each action means, to the validator, the simulator and the executor alike:

    forward   run a block on some samples of a minibatch; the last block's forward includes the loss
    backward  run its backward; needs the gradients of all its outputs for those samples
    send      hand samples of a value, or of its gradient, to another device; does not wait for the peer
    receive   wait for samples of a value, or of its gradient, from another device
    reduce    start to add up a block's gradients among the devices that hold copies of it; does not wait
    step      wait for the block's gradients to be added up, then change its parameters
    push      send a wave of updates of a block to the parameter server
    pull      wait for, and take over, a block's parameters from the parameter server

A device runs its actions in order. Communication runs beside compute: only `receive`, `step` and `pull` wait for it.
Samples that a device needs and already holds take no action, nor does loading the model's inputs and targets: any
device can load any sample.

Parameters. A block with parameters has one `step` on each of its devices and, where it has several, one `reduce`; a
block without has neither. A parameter that several blocks share belongs to the first of them, whose backward comes
last: it is reduced and stepped with that block only. Devices that have several groups in common reduce in the same
order.
Values. One that several blocks of a device take travels there once, before the first of them; its gradient is the sum
over those blocks and travels back once, after the last of their backwards. What the model returns is taken by the last
block, for the loss.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from burstpool.artifact import STRICT, Artifact
from burstpool.errors import ArtifactError, ScheduleError


class Kind(StrEnum):
    """What an action does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"
    STEP = "step"
    PUSH = "push"
    PULL = "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing for one device to do."""

    __pydantic_config__ = STRICT

    kind: Kind
    block: str
    """The block it belongs to; for send and receive, the one that makes the value."""
    minibatch: int = 0
    """Which of the step's minibatches; 0 for reduce, step, push and pull."""
    start: int = 0
    """First sample."""
    stop: int = 0
    """One past the last sample."""
    value: str = ""
    """For send and receive: the value's name in the LayerGraph."""
    gradient: bool = False
    """For send and receive: whether the value's gradient travels, from the block that took the value to the one that
    made it."""
    peer: int = -1
    """For send and receive: the other device."""
    group: tuple[int, ...] = ()
    """For reduce: all devices that hold a copy, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Artifact):
    """A step of training, action by action."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ScheduleError

    schema_version: int = 1
    devices: tuple[tuple[Action, ...], ...]
    """Device index → its actions in order; empty for a device that has nothing to do."""

    def __str__(self) -> str:
        from burstpool.schedule.text import format_schedule  # which reads and writes what is defined here

        return format_schedule(self)
