"""The whole step as one: forward, losses, backward and optimizer recorded in a CUDA graph, compiled if asked.

    step = RecordedStep(array, optimizer, loss, x, y)
    losses = step(x, y)                                       # [M], on the device

With `compiled`, torch.compile's versions of forward pass and losses are tried as well, for all members at once and for
each on its own, and the fastest step is kept; `step.way` says which it was, `step.left_out` what could not be tried.
One whose losses or gradients are not those of the written step, for a mistake of the compiler's, is left out too.

Recording fixes the batch's shape and the array's members: after `drop` or `admit` make a new one. Learning rates and
other numbers may change between steps, as they live on the device; a member may be stopped. The loss's own code runs
no more: what changes from step to step must be a target. On the CPU the step runs as it is written, or compiled.
Ignores host-side work between the parts: clipping by other means than `max_norm` and `max_value` does not fit in.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from burstpool.errors import FusionError
from burstpool.fusion.alike import Seen, seen, unlike
from burstpool.fusion.array import FusedArray
from burstpool.fusion.compiled import APART, TOGETHER, compiled_ways
from burstpool.fusion.gradients import differentiate
from burstpool.fusion.lowering import Choices, described, graph_text, short_key
from burstpool.fusion.optim import ArrayOptimizer, FusedOptimizer
from burstpool.fusion.scaler import LossScaler
from burstpool.fusion.serial import draws
from burstpool.fusion.surroundings import Surroundings
from burstpool.fusion.timing import replay_times, timed
from burstpool.model.recording import recording

_WARM_UP = 3
"""Steps before recording: lowerings are chosen in them, and torch's libraries choose their kernels."""


WRITTEN = "as written"


class RecordedStep:
    """One training step of an array, replayed."""

    def __init__(
        self,
        array: FusedArray,
        optimizer: ArrayOptimizer,
        loss: Callable[..., Tensor],
        inputs: Any,
        *targets: Any,
        per_member: bool = False,
        autocast: torch.dtype | None = None,
        max_norm: float | Sequence[float | None] | None = None,
        max_value: float | Sequence[float | None] | None = None,
        scaler: LossScaler | None = None,
        compiled: bool = False,
        must_record: bool = True,
    ) -> None:
        """`must_record=False` runs a step that cannot be recorded as it is written, instead of refusing it.

        `autocast` is, where it is left out, what is on where the step is made. `scaler` is the array's, for fp16: the
        step scales the losses and passes over members that overflow.
        """
        kind = array.device.type
        array.own(optimizer)
        if scaler is not None:
            array.own(scaler)
        if not callable(loss):
            raise FusionError(f"the loss is a {type(loss).__name__}; pass a function of one member's output")
        if autocast is not None and not isinstance(autocast, torch.dtype):
            raise FusionError(f"autocast={autocast!r}; pass a type such as torch.bfloat16")
        if autocast is None and torch.is_autocast_enabled(kind):
            autocast = torch.get_autocast_dtype(kind)
        self.array, self.optimizer, self.loss, self.per_member = array, optimizer, loss, per_member
        self.autocast, self.max_norm, self.max_value, self.scaler = autocast, max_norm, max_value, scaler
        self._members, self._active = len(array), array.active
        self._must_record, self._surroundings = must_record, Surroundings(loss)
        self._static = pytree.tree_map(_owned, (inputs, targets))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._losses = torch.empty(0)
        self.way = WRITTEN
        """The way that the step runs: a key of `_ways`."""
        self.left_out: dict[str, str] = {}
        """Ways that could not be tried, and why."""
        self.times_s: dict[str, float] = {}
        """What a step took in each way, where they were compared."""
        self._ways: dict[str, Callable[[Any, Sequence[Any]], Tensor]] = {}
        self._right: Seen | None = None
        """The first step as written, which compiled ways are held against."""
        if compiled and scaler is not None:
            self.left_out = dict.fromkeys((TOGETHER, APART), "its losses are scaled")
        elif compiled:
            given = {"per_member": per_member, "autocast": autocast}
            self._ways, self.left_out = compiled_ways(array, loss, **given)  # type: ignore[arg-type]
        if array.device.type == "cuda" and (must_record or isinstance(optimizer, FusedOptimizer)):
            self._record(self._ways_to_try())
        elif self._ways:
            self._choose()

    def __call__(self, inputs: Any, *targets: Any) -> Tensor:
        """The losses [M] of one step; on CUDA the next step overwrites them."""
        if len(self.array) != self._members:
            raise FusionError(
                f"the step was recorded for {self._members} members, the array has {len(self.array)}; record anew"
            )
        if self._graph is not None or self.way != WRITTEN:
            self._check_fixed()
        if self._graph is None:
            return self._step(inputs, targets)
        self._take(inputs, targets)
        self._graph.replay()
        self.array._restore_frozen()
        return self._losses

    @property
    def batch(self) -> tuple[Any, tuple[Any, ...]]:
        """Inputs and targets where a recorded step reads them: a batch that is written there needs no other copy."""
        inputs, targets = self._static
        return inputs, targets

    def _check_fixed(self) -> None:
        """What was recorded or compiled must be what the array and the loss are now."""
        if self.array.active is not self._active:
            raise FusionError("members have left or joined the array since the step was recorded; record anew")
        if name := self._surroundings.changed():
            raise FusionError(
                f"the loss takes {name!r} from its surroundings, which has changed since the step was recorded; "
                "pass it as a target: step(x, y) calls loss(output, y)"
            )
        if self._graph is not None and self.optimizer.keeps_state != self._keeps_state:
            self._record([self.way])  # a member was stopped: its optimizer state stays as it is from now on

    def _take(self, inputs: Any, targets: Sequence[Any]) -> None:
        """The batch to where the recorded step reads it."""
        mine, given = (pytree.tree_leaves(tree) for tree in (self._static, (inputs, targets)))
        if len(mine) != len(given):
            raise FusionError(f"the step was recorded with {len(mine)} inputs and targets, it was given {len(given)}")
        for static, new in zip(mine, given, strict=True):
            if isinstance(static, Tensor):
                if new.shape != static.shape:
                    shapes = f"{list(static.shape)}, it was given one of shape {list(new.shape)}"
                    raise FusionError(f"the step was recorded for a tensor of shape {shapes}; record another step")
                if new is not static:
                    static.copy_(new, non_blocking=True)
            elif new is not static and new != static:
                raise FusionError(f"the step was recorded with {static!r}, it was given {new!r}; record another step")

    def _step(self, inputs: Any, targets: Sequence[Any], *, first: bool = False) -> Tensor:
        """`first`: from the weights and random streams that all ways begin with, to be compared."""
        self.optimizer.zero_grad()
        kind = self.array.device.type
        if self.way == WRITTEN:
            setting = torch.autocast(kind, dtype=self.autocast) if self.autocast else contextlib.nullcontext()
            with setting:
                losses = self.array.losses(inputs, self.loss, *targets, per_member=self.per_member)
            total = (losses if self.scaler is None else self.scaler.scale(losses)).sum()
            differentiate(total, self.array.parameters())
        else:
            losses = self.array.watched(self._ways[self.way](inputs, targets))
            self.array._restore_frozen()
        if first and self._ways:
            self._compare(losses)
        self._update()
        return losses.detach()

    def _update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale()
        if self.max_norm is not None:
            self.array.clip_grad_norm_(self.max_norm)
        if self.max_value is not None:
            self.array.clip_grad_value_(self.max_value)
        if self.scaler is None:
            self.optimizer.step()
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _choose(self) -> None:
        """The fastest way where nothing is recorded."""
        ways = self._ways_to_try()
        if ways == [WRITTEN]:
            return
        saved, (inputs, targets) = self.array.state_dict(), self._static
        if WRITTEN not in ways:
            self._see_written(saved)
        times_s = dict.fromkeys(ways, math.inf)
        for way in ways:
            self.way = way
            try:
                self._step(inputs, targets, first=True)
                times_s[way] = timed(lambda: self._step(inputs, targets), self.array.device)  # type: ignore[arg-type]
            except Exception as error:  # the compiler's own
                self._leave_out(way, error)
            self._rewind(saved)
        if len(ways) > 1:
            self.way = self._learnt(times_s)
        elif self.way in self.left_out:  # it was the fastest once
            self.way = WRITTEN

    def _ways_to_try(self) -> list[str]:
        """All there are, or the one that was the fastest when they were last compared."""
        ways = [WRITTEN, *self._ways]
        if not self._ways:
            return ways
        choices = self._choices()
        known = choices.known(self._key(), ways)
        choices.save()
        return [known] if known is not None else ways

    def _learnt(self, times_s: dict[str, float]) -> str:
        choices, self.times_s = self._choices(), times_s
        fastest = choices.learn(self._key(), times_s)
        choices.save()
        return fastest

    def _choices(self) -> Choices:
        return Choices(self.array.device, self.array.choices_file)

    def _key(self) -> str:
        """What the fastest way depends on. Of the loss only the name: mistaking one for another costs time, no more."""
        array, loss = self.array, getattr(self.loss, "__qualname__", type(self.loss).__qualname__)
        kind = type(self.optimizer.proxies[0]).__name__
        setting = f"M={len(array)} autocast={self.autocast} own={self.per_member} clipped={self.max_norm is not None}"
        shapes = described(pytree.tree_leaves(self._static))
        return short_key(f"compared step {graph_text(array.mode)} {shapes} {setting} {kind} {loss}")

    def _leave_out(self, way: str, error: Exception) -> None:
        if way == WRITTEN:
            raise error
        self.left_out[way] = " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def _record(self, ways: Sequence[str]) -> None:
        if not isinstance(self.optimizer, FusedOptimizer):
            raise FusionError(f"{type(self.optimizer.proxies[0]).__name__} has no formula here and cannot be recorded")
        before = torch.backends.cudnn.benchmark
        # Shapes stay, so cuDNN may choose by trying; before our own lowerings are compared, as it changes their order.
        self.array.recording, torch.backends.cudnn.benchmark = True, True
        saved = self.array.state_dict()
        try:
            self._record_fastest(ways, saved)
            return
        except Exception as error:
            no_memory = isinstance(error, torch.OutOfMemoryError)
            if self._must_record or no_memory or not isinstance(error, RuntimeError):
                self._give_up(saved)
                raise
        finally:
            self.array.recording, torch.backends.cudnn.benchmark = False, before
        gc.collect()  # of what the failed recording holds, nodes of autograd's graph would meet another stream
        self._give_up(saved)

    def _give_up(self, saved: dict[str, Any]) -> None:
        """The loss, or the model, does what a graph cannot hold: all is as before, the step runs as it is written."""
        assert isinstance(self.optimizer, FusedOptimizer)
        self._graph, self.optimizer.recorded, self.way = None, False, WRITTEN
        self._rewind(saved)

    def _record_fastest(self, ways: Sequence[str], saved: dict[str, Any]) -> None:
        """Records each way, keeps the one whose replay is shortest."""
        kept: _Kept | None = None
        times_s = dict.fromkeys(ways, math.inf)
        if WRITTEN not in ways:
            self._see_written(saved)
        for way in ways:
            self.way = way
            try:
                self._warm_up_and_capture(saved)
                time_s = times_s[way] = self._replay_time(kept) if len(ways) > 1 else 0.0
            except Exception as error:  # of a compiled way: the compiler's own, or no memory for one more
                self._leave_out(way, error)
            else:
                if kept is None or time_s < kept.time_s:
                    assert self._graph is not None
                    kept = _Kept(time_s, way, self._graph, self._losses)
            self._graph, self._losses = None, torch.empty(0)
            self._rewind(saved)
        if kept is None:  # the way that was the fastest once cannot be had any more
            self._record_fastest([WRITTEN], saved)
            return
        _, self.way, self._graph, self._losses = kept
        if len(ways) > 1:
            self._learnt(times_s)

    def _replay_time(self, fastest: "_Kept | None") -> float:
        """Of the recorded step; beside the fastest so far, as the device may have other work at times."""
        assert self._graph is not None
        if fastest is None:
            return replay_times([self._graph], self.array.device)[0]
        its_s, mine_s = replay_times([fastest.graph, self._graph], self.array.device)
        return fastest.time_s * mine_s / its_s

    def _warm_up_and_capture(self, saved: dict[str, Any]) -> None:
        inputs, targets = self._static
        assert isinstance(self.optimizer, FusedOptimizer)
        self.optimizer.recorded, self._keeps_state = True, self.optimizer.keeps_state
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for step in range(_WARM_UP):
                    self._step(inputs, targets, first=step == 0)
        finally:  # also where a way is refused, and what it has changed is put back
            torch.cuda.current_stream().wait_stream(side)
        self._rewind(saved)
        self._graph = torch.cuda.CUDAGraph()
        # Each generator costs two launches a replay.
        streams = self.array.streams
        generators = streams.generators if draws(self.array.mode) or streams.draws_in_loss else []
        with recording(self._graph, generators=generators):
            self._losses = self._step(inputs, targets)

    def _see_written(self, saved: dict[str, Any]) -> None:
        """A step as written, to be compared with; without memory for it, ways are taken as they are."""
        self.way, self._right = WRITTEN, None
        with contextlib.suppress(torch.OutOfMemoryError):
            self._step(*self._static, first=True)
        self._rewind(saved)

    def _compare(self, losses: Tensor) -> None:
        """A compiler may err. Gradients are looked at before they are clipped."""
        mine = seen(losses, self.array.state.parameters)
        if self.way == WRITTEN:
            self._right = mine
        elif self._right is not None and (difference := unlike(mine, self._right, random=draws(self.array.mode))):
            raise FusionError(f"it does not do what the step as written does: {difference}")

    def _rewind(self, saved: dict[str, Any]) -> None:
        """Undoes the warm-up in place: the recorded step must find its state where it will be."""
        self.optimizer.zero_grad()
        self.array.load_state_dict(saved)


class _Kept(NamedTuple):
    """A way that was recorded, and the time of its replay."""

    time_s: float
    way: str
    graph: torch.cuda.CUDAGraph
    losses: Tensor


def _owned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
