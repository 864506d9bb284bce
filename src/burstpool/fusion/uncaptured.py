"""Uncaptured: what a member's own module does that the graph captured of it does not hold.

`verify` compares an array with its captured graph; here the graph is compared with the modules themselves. A copy of
each member's module and the graph, both alone, take two steps on the example, in the type they train in and with the
same random stream: the same operators give the same numbers, dropout's too. Raises FusionError that names the first
module whose output differs, or the tensor. What shows only after more steps, or with other inputs, is not seen.

A difference counts only if double precision confirms it: on a GPU a library may choose another kernel for the same
operator, or add up in another order each time, and a deep model makes much of the last digit. Of a module that does not
run in double precision, it counts only beyond what other last digits in its weights change.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from burstpool.errors import FusionError
from burstpool.fusion.compare import cloned, dense, difference_of, is_close, is_inexact, loss_of, size_of, with_absent
from burstpool.fusion.double import doubled, doubled_mode
from burstpool.fusion.modes import Example, Mode
from burstpool.fusion.rules.rounding import convolutions_may_round, products_may_round
from burstpool.fusion.serial import alone, random_operators, tensors_of
from burstpool.fusion.streams import Streams
from burstpool.model.capture import flatten_arguments

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray

_STEPS = 2
"""A Python counter shows in the second."""
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_HALF_TOLERANCE = 2e-2
"""Both run the same operators, mostly with the same bits; attention may choose another kernel while it is captured."""
_CONFIRMED_TOLERANCE = 1e-5
"""In double precision, where the user's own code may still round in between, as by `.float()`."""
_NUDGE = 4
"""Last digits by which weights differ, to see what rounding may change: what a sum of some terms is wrong by."""
_TF32_DIGIT = 2.0**-10
_OWN_CHANGE = 3.0
"""How many times that change another kernel may make."""
_LEAST_GRADIENT = 0.1
"""Of the largest; a gradient that is zero but for rounding, as of a bias before batch norm, is noise of that size."""
_LEAST_OUTPUT = 1e-3
"""Of the largest."""
_LEAST_STATE = 1e-3
"""As it is: what lies in a model has no common size."""
_RECURRENT = (torch.ops.aten.lstm, torch.ops.aten.gru, torch.ops.aten.rnn_tanh, torch.ops.aten.rnn_relu)
"""Whose dropout cuDNN draws from a stream of its own, which cannot be put back."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(slots=True)
class _Done:
    """What one step did."""

    outputs: list[Any]
    state: dict[str, Tensor]
    """Parameters and buffers after it."""
    gradients: dict[str, Tensor | None]
    inner: list[tuple[str, Tensor]] = field(default_factory=list)
    """What the modules gave, in order, each with its name; what the graph's operators gave."""


def check_modules(array: "FusedArray", example: Example) -> None:
    """Refuses members whose own modules train otherwise than the graph that was captured of them."""
    with _streams_kept(), _drawn_by_torch(array), torch.enable_grad(), torch.autocast(array.device.type, enabled=False):
        for member in range(len(array)):
            _check_unheard_hooks(array.state.skeletons[member], member)
            module, graph = _Module(array.state.module(member), array, member), _Graph(array.mode, array, member)
            try:
                _check_steps(graph, module, example)
            except _DiffersError:
                _check_in_double(array, member, example)


def _check_steps(graph: "_Graph", module: "_Module", example: Example, tolerance: float | None = None) -> None:
    for step in range(1, _STEPS + 1):
        _Comparison(module.member, step, module.hooks, tolerance).compare(graph.step(example), module.step(example))


def _check_in_double(array: "FusedArray", member: int, example: Example) -> None:
    """Raises where the two still differ."""
    wide = array.state.module(member)._apply(doubled)  # type: ignore[no-untyped-call]
    module = _Module(wide, array, member)
    graph = _Graph(doubled_mode(array.mode), array, member)
    try:
        _check_steps(graph, module, pytree.tree_map(doubled, example), _CONFIRMED_TOLERANCE)
    except _DiffersError:
        raise
    except FusionError:
        _check_beyond_rounding(array, member, example)


def _check_beyond_rounding(array: "FusedArray", member: int, example: Example) -> None:
    """Where a module does not run in double precision: raises where they differ by more than its own rounding may."""
    graph, module = _Graph(array.mode, array, member), _Module(array.state.module(member), array, member)
    nudged = _Module(array.state.module(member)._apply(_nudged), array, member)  # type: ignore[no-untyped-call]
    for step in range(1, _STEPS + 1):
        comparison = _Comparison(member, step, module.hooks, None, nudged.step(example))
        comparison.compare(graph.step(example), module.step(example))


def _nudged(tensor: Tensor) -> Tensor:
    """The same with other last digits, drawn once and for all."""
    if not is_inexact(tensor):
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    in_tf32 = tensor.is_cuda and tensor.dtype is torch.float32 and (products_may_round() or convolutions_may_round())
    digit = _TF32_DIGIT if in_tf32 else torch.finfo(tensor.dtype).eps
    return tensor * (1 + _NUDGE * digit * signs.to(tensor.device, tensor.dtype))


class _DiffersError(FusionError):
    """Module and graph gave different numbers."""


class _Module:
    """A copy of a member's module, hooks included."""

    def __init__(self, module: nn.Module, array: "FusedArray", member: int) -> None:
        self.member, self.streams, self.aliases = member, array.streams.clone(), array.state.aliases
        self.module = module
        if self.module.training != array.training:
            self.module.train(array.training)
        self.hooks = _hooks(self.module)
        self.inner: list[tuple[str, Tensor]] = []
        for name, module in self.module.named_modules():
            module.register_forward_hook(partial(self._record, name))

    def _record(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        found = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        self.inner += [(name, tensor.detach().clone()) for tensor in found]

    def step(self, example: Example) -> _Done:
        """What training alone does, but for the optimizer."""
        args, kwargs = pytree.tree_map(cloned, example)
        self.inner = []
        try:
            output = _drawing(self.streams, self.member, lambda: self.module(*args, **kwargs))
            outputs = pytree.tree_leaves(output)
            parameters = self._first(dict(self.module.named_parameters(remove_duplicate=False)))
            gradients = _gradients(loss_of(outputs), parameters)
        except Exception as error:
            raise FusionError(
                f"verification failed: a copy of member {self.member}'s own module does not run on the example: "
                f"{type(error).__name__}: {error}"
            ) from error
        buffers = self._first(dict(self.module.named_buffers(remove_duplicate=False)))
        return _Done(outputs, _copied({**parameters, **buffers}), gradients, self.inner)

    def _first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A tensor with several names, once."""
        return {key: tensor for key, tensor in tensors.items() if self.aliases.get(key, key) == key}


class _Graph:
    """The captured graph, or the same in double precision, with a member's own tensors."""

    def __init__(self, mode: Mode, array: "FusedArray", member: int) -> None:
        self.mode, self.member, self.streams = mode, member, array.streams.clone()
        state = array.state
        self.tensors = {}
        laid = state.member(member, persistent=False)
        for key, tensor in state.tensors.items():
            mine = laid[key]
            self.tensors[key] = (mine if mode is array.mode else doubled(mine)).requires_grad_(tensor.requires_grad)
        capture = self.mode.capture
        keys = {**capture.parameters, **capture.buffers}
        self.stored: dict[str, Any] = {name: self.tensors[state.aliases[key]] for name, key in keys.items()}
        self.stored.update(zip(capture.constants, map(cloned, self.mode.constants[member]), strict=True))
        self.parameters = {key: self.tensors[key] for key in state.parameters}

    def step(self, example: Example) -> _Done:
        """The operators one by one."""
        inner: list[tuple[str, Tensor]] = []

        def visit(key: str, node: Any, result: Any) -> Any:
            inner.extend((key, tensor.detach().clone()) for tensor in tensors_of(result))
            return result

        leaves = [cloned(leaf) for leaf in flatten_arguments(*example)[0]]
        inputs = {name: leaf for name, leaf in zip(self.mode.capture.inputs, leaves, strict=True) if name}
        values = {**self.stored, **with_absent(self.mode, inputs)}
        outputs = _drawing(self.streams, self.member, lambda: alone(self.mode, self.member, values, visit))
        gradients = _gradients(loss_of(outputs), self.parameters)
        return _Done(outputs, _copied(self.tensors), gradients, inner)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One step of one member."""

    member: int
    step: int
    hooks: tuple[str, ...]
    tolerance: float | None
    """None for that of the numbers' type."""
    nudged: _Done | None = None
    """The module's step with other last digits in its weights: what differs no more than they make it is rounding."""

    def compare(self, graph: _Done, module: _Done) -> None:
        """Outputs, then what was written, then gradients."""
        nudged = self.nudged or module
        if not len(graph.outputs) == len(module.outputs) == len(nudged.outputs):
            raise self._error("gives another number of outputs", "")
        largest = max((size_of(t.detach()) for t in module.outputs if isinstance(t, Tensor)), default=0.0)
        for mine, theirs, other in zip(graph.outputs, module.outputs, nudged.outputs, strict=True):
            if not self._same(mine, theirs, other, _LEAST_OUTPUT * largest):
                raise self._error("gives another output", _first_module(graph, module), mine, theirs)
        for key, theirs in module.state.items():
            mine = graph.state.get(key)
            if not self._same(mine, theirs, nudged.state.get(key), _LEAST_STATE):
                raise self._error(f"leaves another {key!r}", "", mine, theirs)
        largest = max(map(size_of, module.gradients.values()), default=0.0)
        for key, gradient in module.gradients.items():
            mine = graph.gradients.get(key)
            if not self._same_gradient(mine, gradient, nudged.gradients.get(key), _LEAST_GRADIENT * largest):
                raise self._error(f"gives {key!r} another gradient", "", mine, gradient)

    def _same(self, a: Any, b: Any, nudged: Any, least: float) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            a, b = a.detach(), b.detach()
            if is_close(a, b, tolerance=self.tolerance or _tolerance(b), least=least):
                return True
            is_rounded = isinstance(nudged, Tensor) and is_inexact(b) and a.shape == b.shape == nudged.shape
            return is_rounded and difference_of(a, b) <= _OWN_CHANGE * difference_of(nudged.detach(), b)
        if isinstance(a, _PLAIN) and isinstance(b, _PLAIN):
            return a == b or (a != a and b != b)
        return isinstance(a, Tensor) == isinstance(b, Tensor)

    def _same_gradient(self, a: Tensor | None, b: Tensor | None, nudged: Tensor | None, least: float) -> bool:
        """None is as good as zero."""
        if a is None or b is None:
            return size_of(a) + size_of(b) == 0.0
        return self._same(a, b, nudged, least)

    def _error(self, what: str, where: str, mine: Any = None, theirs: Any = None) -> _DiffersError:
        both = isinstance(mine, Tensor) and isinstance(theirs, Tensor)
        size = f" (largest difference {difference_of(mine.detach(), theirs.detach()):.2g})" if both else ""
        hooks = f"; there are hooks on {', '.join(self.hooks)}" if self.hooks else ""
        return _DiffersError(
            f"verification failed: in its step {self.step} member {self.member}'s own module {what} than the graph "
            f"captured of it{where}{size}: the model does something that a captured graph does not hold, such as "
            f"hooks, Python state that changes, or random numbers that are not torch's{hooks}"
        )


def _first_module(graph: _Done, module: _Done) -> str:
    """The first module that gives what no operator of the graph gives."""
    for name, output in module.inner:
        alike = (result for _, result in graph.inner if result.shape == output.shape)
        if not any(is_close(result, output, tolerance=_tolerance(output)) for result in alike):
            return f", first in module {name!r}" if name else ""
    return ""


def _tolerance(tensor: Tensor) -> float:
    return _TOLERANCES.get(tensor.dtype, _HALF_TOLERANCE)


def _gradients(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """By a backward pass as in training, so that hooks run."""
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    found: dict[str, Tensor | None] = {}
    for key, parameter in parameters.items():
        found[key] = dense(parameter.grad)
        parameter.grad = None
    return found


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def _check_unheard_hooks(skeleton: nn.Module, member: int) -> None:
    """Hooks that change what they close over, such as an optimizer: they are not run to see whether they matter."""
    for name, parameter in skeleton.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise FusionError(
                f"verification failed: parameter {name!r} of member {member} has a hook on its accumulated gradient, "
                "which an array does not call; do what it does after array.losses(…).sum().backward()"
            )


def _hooks(model: nn.Module) -> tuple[str, ...]:
    """What carries hooks, in words."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [name for name, module in model.named_modules() if any(getattr(module, kind) for kind in kinds)]
    parameters = [name for name, parameter in model.named_parameters() if parameter._backward_hooks]
    return (
        *(f"module {name!r}" if name else "the model itself" for name in modules),
        *(f"parameter {name!r}" for name in parameters),
    )


def _drawing(streams: Streams, member: int, function: Callable[[], Any]) -> Any:
    """With the member's stream; what an array on a GPU draws on the CPU starts alike each time."""
    with torch.random.fork_rng(devices=[]):
        return streams.drawing(member, function)


def _drawn_by_torch(array: "FusedArray") -> AbstractContextManager[None]:
    """Both runs draw the same numbers: without cuDNN where recurrent networks have dropout."""
    drawing = (getattr(node.target, "overloadpacket", None) for node in random_operators(array.mode))
    is_recurrent = array.device.type == "cuda" and any(packet in _RECURRENT for packet in drawing)
    return torch.backends.cudnn.flags(enabled=False) if is_recurrent else nullcontext()


@contextmanager
def _streams_kept() -> Iterator[None]:
    """Python's random numbers, and numpy's where it is loaded, go on afterwards as if nothing had been drawn."""
    numpy = sys.modules.get("numpy")
    before, numpy_before = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(numpy_before)
