"""The background's side of a gate: a process of the lowest priority that asks before every slice of its work.

A slice is what lies between two actions of its schedule: the forward or backward of a block of layers, or the change
of some parameters; of a fused array its forward, backward and change. Slicing changes no kernel, so that a job trains
as it would alone. Its memory is capped, and it is what the kernel ends first when memory runs out. On a GPU a slice is
over when the device has done it, and the cap is on the GPU's memory.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from burstpool.engine.base import Doing, Place, phrase
from burstpool.share.background_process import cap_memory, take_lowest_priority
from burstpool.share.budget import Credit, Moment
from burstpool.share.gates.gate import Gate

_PATIENCE_S = 1.0
"""How often a process that waits says so, lest it be taken for one that hangs."""
_CALM = tuple(phrase(f"waiting for the foreground{'.' * dots}") for dots in (0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedTask:
    """A task to be run behind a gate; picklable."""

    work: Callable[[Place, Any], Any]
    task: Any
    gate: str
    memory_bytes: int | None
    """What it may allocate beyond what starting up took; None for no limit, or on a GPU for its share."""
    lowest_priority: bool
    gpu: int | None = None
    """The device of the plan whose GPU it works on; None on a CPU."""
    gpu_share: float = 1.0
    """Of what the GPU has free when it starts, what it may take."""


def gated_work(place: Place, task: GatedTask) -> Any:
    """What a background process runs."""
    if task.lowest_priority:
        take_lowest_priority()
    gate = Gate(task.gate)
    gate.forget_slice()
    if task.gpu is not None:
        return _on_gpu(place, task, gate)
    if task.memory_bytes is not None:
        cap_memory(task.memory_bytes)
    return task.work(replace(place, doing=GatedDoing(place.doing, gate)), task.task)


def _on_gpu(place: Place, task: GatedTask, gate: Gate) -> Any:
    import torch

    assert task.gpu is not None
    device = task.gpu % max(torch.cuda.device_count(), 1)
    free, total = torch.cuda.mem_get_info(device)
    allowed = min(int(task.gpu_share * free), task.memory_bytes or total)
    torch.cuda.set_per_process_memory_fraction(min(allowed / total, 1.0), device)
    gate.count_by_wall()
    doing = GatedDoing(place.doing, gate, wait=torch.cuda.synchronize)
    return task.work(replace(place, doing=doing, local_rank=device), task.task)


class GatedDoing:
    """A worker's `Doing` that waits before each action until the foreground lets it start."""

    def __init__(self, inner: Doing, gate: Gate, *, wait: Callable[[], None] = lambda: None) -> None:
        """`wait` returns when the device has done what it was given."""
        self._inner, self._gate, self._wait_for_device = inner, gate, wait
        self._moment: Moment | None = None
        self._foreground_step = -1.0
        moments: list[Moment] = [each for each in Moment if each is not Moment.ENDED]  # then all is allowed
        self._credit = {moment: Credit() for moment in moments}
        self._seen_s = {moment: gate.allowed_so_far_s(moment) for moment in moments}
        """What the foreground's steps had allowed when credits were last added to."""
        self._slice_s = 0.0
        self._step = -1

    def begin_step(self, step: int) -> None:
        """See `Doing`."""
        self._inner.begin_step(step)
        if step > self._step >= 0:
            self._gate.end_background_step()
        self._step = step

    def say(self, words: bytes) -> None:
        """Ends a slice, and returns when the next may start."""
        self._end_slice()
        if self._step >= 0:  # setting up is no slice; it is done while the foreground sets itself up
            moment = self._wait()
            self._gate.begin_slice(moment)
            self._moment = moment
        self._inner.say(words)

    def _end_slice(self) -> None:
        if self._moment is None:
            return
        self._wait_for_device()
        work_s = self._gate.end_slice()
        self._slice_s = work_s if not self._slice_s else self._slice_s + 0.1 * (work_s - self._slice_s)
        if self._moment in self._credit:
            self._credit[self._moment].spend(work_s)
        self._moment = None

    def _wait(self) -> Moment:
        """Until there is credit for a slice at the moment that it is."""
        gate, said_s, dots = self._gate, time.monotonic(), 0
        if self._has_credit(moment := gate.moment):
            return moment
        gate.say_waiting(True)
        while not self._has_credit(moment := gate.moment):  # after it is said: what is allowed in between is not missed
            gate.sleep(_PATIENCE_S)
            if time.monotonic() - said_s > _PATIENCE_S:
                said_s, dots = time.monotonic(), 1 - dots
                self._inner.say(_CALM[dots])
        gate.say_waiting(False)
        return moment

    def _has_credit(self, moment: Moment) -> bool:
        gate = self._gate
        if gate.step != self._foreground_step:
            self._foreground_step = gate.step
            for each, credit in self._credit.items():
                so_far_s = gate.allowed_so_far_s(each)
                new_s, self._seen_s[each] = so_far_s - self._seen_s[each], so_far_s
                last_s = min(gate.allowed_s(each), new_s)
                # Steps that came and went during a slice pay for their part of it; of what they leave, `add` keeps no
                # more than a slice.
                credit.add(new_s - last_s, piece_s=self._slice_s)
                credit.add(last_s, piece_s=self._slice_s)
        allowed_s = gate.allowed_s(moment)
        return allowed_s == float("inf") or (allowed_s > 0 and self._credit[moment].covers(self._slice_s))
