"""Grouping: which of many models can be one array, how many fit, and what to do when they do not.

Takes jobs or models. Returns a `Grouping`: arrays-to-be, and for each member that starts a new one the reason why it
could not join an earlier one. Sizes come from two pure functions over measurements: `array_size` (memory) and `knee`
(throughput). `BackingOff` runs steps and halves an array that runs out of memory, without losing anyone's progress.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from burstpool.errors import FusionError
from burstpool.fusion.array import FusedArray
from burstpool.fusion.inputs import model_arguments
from burstpool.fusion.modes import Example, Mode
from burstpool.fusion.same import same_function
from burstpool.fusion.state import skeleton
from burstpool.fusion.structure import check_same_state

if TYPE_CHECKING:
    from burstpool.job import Job

_HEADROOM = 0.9
"""Share of the memory to fill: the allocator needs some room of its own."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which members go together."""

    groups: tuple[tuple[int, ...], ...]
    """Indices of what was given, in order."""
    reasons: Mapping[int, str]
    """For the first member of every group but the first: why it could not join an earlier one."""

    def __str__(self) -> str:
        lines = []
        for number, group in enumerate(self.groups):
            reason = f" — apart because {self.reasons[group[0]]}" if group[0] in self.reasons else ""
            lines.append(f"array {number}: {', '.join(map(str, group))}{reason}")
        return "\n".join(lines)


def group_models(models: Sequence[nn.Module], examples: Sequence[Any]) -> Grouping:
    """Groups models by the shape of their graphs; an example for each, as `fuse` takes it."""
    if len(models) != len(examples):
        raise FusionError(f"{len(examples)} examples for {len(models)} models; pass one each")
    return _grouped(
        [
            _Candidate(model, lambda model=model: model, model_arguments(example), "")  # type: ignore[misc]
            for model, example in zip(models, examples, strict=True)
        ]
    )


def group_jobs(jobs: "Sequence[Job]", *, batch: int | None = None) -> Grouping:
    """Groups jobs by model, loss, batch and kind of optimizer; rates, seeds and other numbers may differ."""
    return _grouped([_candidate(job, job.build_model(), batch) for job in jobs])


class Groups:
    """Groups of jobs that come one by one."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._next = 0
        self.reasons: dict[int, str] = {}
        """For each group but the first: why its first job could not join an earlier one."""

    def place(self, job: "Job", model: nn.Module, *, batch: int | None = None) -> int:
        """The number of the group that the job, with its built model, goes to; a new one where it fits in none."""
        candidate = _candidate(job, model, batch)
        reasons: list[_ApartError] = []
        for number, group in self._groups.items():
            try:
                group.add(len(group.members), candidate)
                return number
            except _ApartError as error:
                reasons.append(error)
        return self.open(candidate, reason=str(_nearest(reasons)) if reasons else "")

    def open(self, candidate: "_Candidate | None" = None, *, number: int | None = None, reason: str = "") -> int:
        """A new group; without a candidate it is one that no other job joins."""
        number = self._next if number is None else number
        self._next = max(self._next, number + 1)
        if candidate is not None:
            self._groups[number] = _Group(0, candidate)
        if reason:
            self.reasons[number] = reason
        return number

    def reopen(self, number: int, job: "Job", model: nn.Module, *, batch: int | None = None) -> None:
        """A group of an earlier process, by its first job."""
        self.open(_candidate(job, model, batch), number=number)


def _candidate(job: "Job", model: nn.Module, batch: int | None) -> "_Candidate":
    optimizer = job.optimizer(model.parameters())
    # What of an optimizer is no number must agree for one update of all.
    flags = [f"{k}={v}" for k, v in optimizer.defaults.items() if isinstance(v, bool | str) and v]
    schedule = "a schedule" if job.scheduler else "no schedule"
    loss = getattr(job.loss, "__qualname__", type(job.loss).__name__)
    text = f"{' '.join([type(optimizer).__name__, *flags])}, {schedule}, loss {loss}, batch {batch or job.batch}"
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    groups = tuple(tuple(places.get(id(p), -1) for p in group["params"]) for group in optimizer.param_groups)
    return _Candidate(model, job.build_model, job.example(batch or job.batch), text, job.loss, groups)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A model and what else must agree."""

    model: nn.Module
    build: Callable[[], nn.Module]
    """The same model, where the example is: whoever has `model` may have moved it to a device by then."""
    example: Example
    setting: str
    loss: Callable[..., Any] | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    """Which parameters are in each of the optimizer's groups, by their place in the model."""


class _ApartError(FusionError):
    """Why a candidate is not in a group; the more checks it has passed, the nearer it is to it."""

    def __init__(self, error: FusionError, *, passed: int, reference: int) -> None:
        super().__init__(str(error))
        self.passed, self.reference = passed, reference


def _nearest(reasons: Sequence[_ApartError]) -> _ApartError:
    """Of several groups' the first that is nearest: the others differ in more."""
    return max(reasons, key=lambda reason: reason.passed)


class _Group:
    """A group in the making: its graph is captured when a second model of the same state comes."""

    def __init__(self, index: int, first: _Candidate) -> None:
        self.members, self.first = [index], replace(first, model=skeleton(first.model))
        self._mode: Mode | None = None

    def add(self, index: int, other: _Candidate) -> None:
        """Takes the candidate in, or raises _ApartError saying why not."""
        empty, reference, passed = skeleton(other.model), self.members[0], 0
        try:
            self._check_setting(other)
            passed += 1
            check_same_state(self.first.model, empty, member=index, reference=reference)
            passed += 1
            self._check_inputs(other)
            passed += 1
            self._captured().admit(empty, lambda: other.model, member=index, reference=reference)
        except FusionError as error:
            raise _ApartError(error, passed=passed, reference=reference) from error
        self.members.append(index)

    def _check_setting(self, other: _Candidate) -> None:
        if other.setting != self.first.setting:
            raise FusionError(f"it trains with {other.setting}, the other with {self.first.setting}")
        if other.groups != self.first.groups:
            sizes, theirs = ([len(group) for group in one.groups] for one in (other, self.first))
            raise FusionError(f"its optimizer has groups of {sizes} parameters, the other's of {theirs}, or other ones")
        if self.first.loss and other.loss and not same_function(self.first.loss, other.loss):
            raise FusionError("its loss is not surely the other's: other code, or other values in it")

    def _check_inputs(self, other: _Candidate) -> None:
        if _shapes(other.example) != _shapes(self.first.example):
            raise FusionError(f"its input is {_shapes(other.example)}, the other's {_shapes(self.first.example)}")

    def _captured(self) -> Mode:
        if self._mode is None:
            self._mode = Mode([self.first.model], lambda _: self.first.build(), self.first.example)
        return self._mode


def _grouped(candidates: Sequence[_Candidate]) -> Grouping:
    groups: list[_Group] = []
    reasons: dict[int, str] = {}
    for index, candidate in enumerate(candidates):
        apart: list[_ApartError] = []
        for group in groups:
            try:
                group.add(index, candidate)
                break
            except _ApartError as error:
                apart.append(error)
        else:
            groups.append(_Group(index, candidate))
            if apart:
                nearest = _nearest(apart)
                reasons[index] = f"{nearest} (array of member {nearest.reference})"
    return Grouping(tuple(tuple(group.members) for group in groups), reasons)


def _shapes(example: Example) -> str:
    tensors = [t for t in torch.utils._pytree.tree_leaves(example) if isinstance(t, Tensor)]
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


def array_size(*, one_bytes: int, two_bytes: int, memory_bytes: int) -> int:
    """Members that fit: a line through the peak memory of arrays of one and of two.

    As Hydro (Hu et al., OSDI'23) plans it, with room left for the allocator.
    """
    member_bytes = max(1, two_bytes - one_bytes)
    fixed_bytes = one_bytes - member_bytes
    return max(1, int((memory_bytes * _HEADROOM - fixed_bytes) // member_bytes))


def knee(samples_per_s: Mapping[int, float], *, gain: float = 1.1) -> int:
    """The size after which the next measured one does not bring `gain` times the throughput any more."""
    sizes = sorted(samples_per_s)
    if not sizes:
        raise FusionError("no throughput was measured; pass at least one size")
    best = sizes[0]
    for size in sizes[1:]:
        if samples_per_s[size] < gain * samples_per_s[best]:
            break
        best = size
    return best


def member_bytes(array: FusedArray, *, samples: int, slots: int = 2) -> int:
    """What one member needs in training: weights, gradients, `slots` of optimizer state, and kept results.

    An estimate from the captured shapes that counts every operator's result as kept; views are counted too, so it
    errs to the large side.
    """
    weights = sum(t[0].numel() * t.element_size() for t in array.parameters())
    buffers = sum(t[0].numel() * t.element_size() for t in array.state.buffers.values())
    return (
        weights * (2 + slots) + buffers + sum(_result_bytes(node, samples) for node in array.mode.capture.graph.nodes)
    )


def _result_bytes(node: torch.fx.Node, samples: int) -> int:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return 0
    count = 1
    size: Any
    for size in value.shape:
        hint = size.node.hint if isinstance(size, torch.SymInt) else None
        count *= int(size) if hint is None else max(1, samples * int(hint) // _batch_hint(node))
    return count * value.element_size()


def _batch_hint(node: torch.fx.Node) -> int:
    for other in node.graph.nodes:
        value = other.meta.get("val")
        if other.op == "placeholder" and isinstance(value, Tensor):
            found: list[Any] = [size for size in value.shape if isinstance(size, torch.SymInt)]
            if found:
                return int(found[0].node.hint)
    return 1


class BackingOff:
    """Runs forward and backward passes; halves an array that runs out of memory and runs it again.

    What a failed pass has changed (buffers, random streams, gradients) is undone first, so that nobody's training
    differs from what it would have been. Covers forward and backward, not the optimizer's step.
    """

    def __init__(self, array: FusedArray) -> None:
        self.arrays = [array]
        """The arrays that the members are in now."""

    def run(self, forward_backward: Callable[[FusedArray], Any]) -> list[Any]:
        """The function's result for each array; it must go backward and leave the optimizer's step to the caller."""
        results: list[Any] = []
        place = 0
        while place < len(self.arrays):
            array = self.arrays[place]
            before = _Before(array)
            try:
                results.append(forward_backward(array))
                place += 1
                continue
            except torch.OutOfMemoryError as error:
                if len(array) == 1:
                    raise FusionError(f"one member alone does not fit: {error}; take fewer samples a step") from error
            # Not above: the error holds what the failed pass has allocated.
            before.restore(array)
            half = array.split(range(len(array) // 2, len(array)))
            self.arrays.insert(place + 1, half)
        return results


class _Before:
    """What a pass changes, as it was: gradients that others have left are added to, not replaced."""

    def __init__(self, array: FusedArray) -> None:
        self.buffers = {key: buffer.clone() for key, buffer in array.state.buffers.items()}
        self.gradients = {key: None if p.grad is None else p.grad.clone() for key, p in array.named_parameters()}
        self.streams, self.active = array.streams.states(), array.active.clone()

    def restore(self, array: FusedArray) -> None:
        """Undoes a pass."""
        with torch.no_grad():
            for key, saved in self.buffers.items():
                array.state.buffers[key].copy_(saved)
            array.active.copy_(self.active)
        array.streams.restore(self.streams)
        for key, parameter in array.named_parameters():
            parameter.grad = self.gradients[key]
        if array.device.type == "cuda":
            torch.cuda.empty_cache()
