"""Lowerings: which of an operator's ways is fastest for its shapes, measured once and kept on disk.

Takes a plan and real inputs. Each operator with several lowerings (see rules/convolution.py, rules/norms.py) is run
forward and backward with each of them, on the device and the shapes at hand; `mode="fastest"` then also compares the
whole with one member after another. What was measured is kept in a JSON file a device and torch version, under
BURSTPOOL_CACHE. Choosing operator by operator does not see how one's layout suits the next, and a busy machine
misleads it: so the whole is compared with the rules' own choices, and the faster of the two is taken.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from burstpool.fusion import kernels
from burstpool.fusion.modes import Mode
from burstpool.fusion.plan import Plan, Step
from burstpool.fusion.rules import Run
from burstpool.fusion.rules.concurrent import is_in_turn
from burstpool.fusion.rules.rounding import convolutions_may_round
from burstpool.fusion.serial import draws, run_serially, tensors_of
from burstpool.fusion.timing import NO_MEMORY_S, timed, timed_recorded
from burstpool.model.capture import batch_of

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray

_LOG = logging.getLogger(__name__)
_SERIAL = "serial"
_FUSED = "fused"
_RULES = "rules"
_STREAMS = "streams"
_SOME = 8
ONE_BY_ONE = (_SERIAL, _STREAMS)
"""Choices that do not fuse: one member after another, or members side by side on streams."""


def cache_file(device: torch.device) -> Path:
    """Where the choices for a device are kept."""
    root = os.environ.get("BURSTPOOL_CACHE") or Path.home() / ".cache" / "burstpool"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}-{torch.get_num_threads()}"
    safe = "".join(c if c.isalnum() else "-" for c in f"{name}-torch{torch.__version__}")
    return Path(root) / "lowerings" / f"{safe}.json"


class Choices:
    """Measured times, by what was measured: those of this machine, and before them those that an array keeps."""

    def __init__(self, device: torch.device, kept_in: Path | None = None) -> None:
        """`kept_in` is a file for all times that are looked up here: whoever goes on with it chooses alike."""
        self.file, self.kept_in = cache_file(device), kept_in
        self.times_s = self._read(self.file)
        self.kept_s = self._read(kept_in) if kept_in is not None else {}
        self.measured = self.added = 0
        """How many were not on disk: on the machine's, in the array's own file."""

    @staticmethod
    def _read(file: Path) -> dict[str, dict[str, float]]:
        try:
            found: dict[str, dict[str, float]] = json.loads(file.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def best(self, key: str, candidates: Mapping[str, Callable[[], float]]) -> str:
        """The fastest candidate's name; measures those that were never measured."""
        known = self.known(key, candidates.keys())
        return known or self.learn(key, {name: measure() for name, measure in candidates.items()})

    def known(self, key: str, names: Collection[str]) -> str | None:
        """The fastest of these as they were measured once; None where they were not."""
        for times_s in (self.kept_s.get(key, {}), self.times_s.get(key, {})):
            if times_s.keys() == set(names):
                return self._keep(key, times_s)
        return None

    def learn(self, key: str, times_s: dict[str, float]) -> str:
        """Takes up what was measured; returns the fastest's name. What found no memory is measured anew next time."""
        if NO_MEMORY_S not in times_s.values():
            self.times_s[key] = times_s
            self.measured += 1
        return self._keep(key, times_s)

    def _keep(self, key: str, times_s: dict[str, float]) -> str:
        if self.kept_s.get(key) != times_s:
            self.kept_s[key] = times_s
            self.added += 1
        return min(times_s, key=times_s.__getitem__)

    def save(self) -> None:
        """Writes the files."""
        if self.measured:
            # What other processes have measured meanwhile stays.
            self.times_s = {**Choices._read(self.file), **self.times_s}
            self._write(self.file, self.times_s)
        if self.added and self.kept_in is not None:
            self._write(self.kept_in, self.kept_s)

    @staticmethod
    def _write(file: Path, times_s: dict[str, dict[str, float]]) -> None:
        """In one move, so that a reader never sees half of it."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(times_s))
            part.replace(file)
        except OSError:
            return  # a full or read-only disk costs a measurement next time, no more


def choose_lowerings(
    array: "FusedArray",
    mode: Mode,
    batched: frozenset[str],
    named: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    serial: bool,
) -> Plan:
    """The plan with measured lowerings; its `choice` is in ONE_BY_ONE where that is faster."""
    samples = batch_of(tuple(v[0] if n in batched else v for n, v in named.items() if isinstance(v, Tensor)), {})
    autocast = torch.is_autocast_enabled(array.device.type)
    key = (samples, len(array), torch.is_grad_enabled(), autocast, array.recording, is_in_turn())
    plan = mode.plan(batched, key)
    if plan.choice is None:
        if array.device.type == "cuda":
            plan.merge()
        choices = Choices(array.device, array.choices_file)
        tuner = _Tuner(array, mode, plan, choices)
        with contextlib.suppress(torch.OutOfMemoryError):
            tuner.tune(batched, values, serial=serial)
        if plan.choice is None:
            tuner.give_up()
        choices.save()
    return plan


class _Tuner:
    """Measures on copies: no buffer and no random stream moves."""

    def __init__(self, array: "FusedArray", mode: Mode, plan: Plan, choices: Choices) -> None:
        self.array, self.mode, self.plan, self.choices = array, mode, plan, choices

    def run(self) -> Run:
        return Run(members=len(self.array), streams=self.array.streams.clone())

    def tune(self, batched: frozenset[str], values: Mapping[str, Any], *, serial: bool) -> None:
        copies = {name: _copied(value) for name, value in values.items()}
        inputs = [copies[node.name] for node in self.plan.placeholders]
        self.plan.walk(self.run(), inputs, self._visit)
        steps = [step for step in self.plan.steps if step.lowered.others]
        chosen = [step.chosen for step in steps]
        best = self._whole(copies, inputs, batched, steps, serial=serial)
        self._use(steps, [""] * len(steps) if best == _RULES else chosen)
        self.plan.choice = best

    def give_up(self) -> None:
        """Takes the rules' own choices, where memory does not hold the copies that measuring needs."""
        steps = [step for step in self.plan.steps if step.lowered.others]
        self._use(steps, [""] * len(steps))
        self.plan.choice = _RULES

    def _use(self, steps: Sequence[Step], names: Sequence[str]) -> None:
        for step, name in zip(steps, names, strict=True):
            step.choose(name)
        self.plan.recompile()

    def _visit(self, step: Step, arguments: list[Any], result: Any) -> Any:
        if step.lowered.others:
            candidates = {"": step.lowered.kernel, **step.lowered.others}
            key = f"{step.node.target} {described(arguments)} {self._setting()}"
            measures = {name: self._measure(name, kernel, arguments) for name, kernel in candidates.items()}
            step.choose(self.choices.best(key, measures))
            return step.kernel(self.run(), *arguments)  # in the layout that the next operator will find
        return result

    def _setting(self) -> str:
        kind = self.array.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        how = f"{' recorded' if self.array.recording else ''}{' in turn' if is_in_turn() else ''}"
        if kind == "cuda":  # what "kernel" stands for depends on both
            how += f" tf32={convolutions_may_round()} kernels={kernels.present()}"
        return f"M={len(self.array)} autocast={autocast}{how}"

    def _timed(self, function: Callable[[], None], run: Run) -> float:
        if not self.array.recording:
            return timed(function, self.array.device)
        return timed_recorded(function, self.array.device, run.streams.generators, in_a_row=is_in_turn())

    def _measure(self, name: str, kernel: Callable[..., Any], arguments: list[Any]) -> Callable[[], float]:
        """A way that fails, as a kernel may that asks too much of a GPU, takes forever; but the rule's own raises."""

        def once() -> None:
            fresh = [_leaf(argument) for argument in arguments]
            _backward(kernel(run, *fresh))

        def measured() -> float:
            try:
                return self._timed(once, run)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not name:
                    raise
                _LOG.info("%s is not tried: %s", name, " ".join(f"{type(error).__name__}: {error}".split())[:300])
                return math.inf

        run = self.run()
        return measured

    def _whole(
        self,
        copies: Mapping[str, Any],
        inputs: list[Any],
        batched: frozenset[str],
        steps: Sequence[Step],
        *,
        serial: bool,
    ) -> str:
        """The fastest as a whole: each operator's best, the rules' own choices, or one member after another."""
        chosen, run = [step.chosen for step in steps], self.run()

        def fused() -> None:
            _backward(self.plan(run, [_leaf(value) for value in inputs]))

        def one_by_one(concurrent: bool) -> None:
            leaves = {name: _leaf(value) for name, value in copies.items()}
            _backward(run_serially(self.mode, run, leaves, batched, concurrent=concurrent, only=some))

        def timed_with(names: Sequence[str]) -> float:
            self._use(steps, names)
            return self._timed(fused, run)

        candidates = {_FUSED: lambda: timed_with(chosen)}
        if any(chosen):
            candidates[_RULES] = lambda: timed_with([""] * len(steps))
        # One by one, a few members tell how long all take.
        some = min(len(self.array), _SOME) if self.array.device.type == "cuda" else len(self.array)
        times = len(self.array) / some
        if serial:
            candidates[_SERIAL] = lambda: times * self._timed(lambda: one_by_one(False), run)
        if serial and self.array.recording and not draws(self.mode):
            candidates[_STREAMS] = lambda: times * self._timed(lambda: one_by_one(True), run)
        if len(candidates) == 1:
            return _FUSED
        key = f"plan {graph_text(self.mode)} {described(inputs)} {self._setting()} {chosen}"
        return self.choices.best(short_key(key), candidates)


def graph_text(mode: Mode) -> str:
    """The first member's operators, a line each."""
    return "\n".join(f"{operator.text} {dict(operator.numbers)}" for operator in mode.operators[0])


def short_key(key: str) -> str:
    """A key that takes the place of a long one."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _leaf(argument: Any) -> Any:
    """The argument as a leaf of its own graph, in the same memory layout."""
    if isinstance(argument, list | tuple) and not hasattr(argument, "values"):
        return type(argument)(_leaf(item) for item in argument)
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().requires_grad_(argument.requires_grad)


def _backward(result: Any) -> None:
    tensors = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def described(value: Any) -> str:
    """Shapes, layouts and number formats of tensors, and all else as it prints."""
    if isinstance(value, Tensor):
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
        return f"{list(value.shape)}{''.join(map(str, order))}{str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(described(item) for item in value)}]"
    return repr(value)
