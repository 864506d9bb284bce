"""Tracing by modules: the fallback where operators cannot be captured.

Runs the model once and watches which module calls hand tensors to one another. A module that only hands tensors
from child to child is split into them, and they in turn; a module that runs any operator of its own, if only to
decide which child to call, stays whole. Takes a module and its arguments, returns a `TracedModel`. FLOPs are not
counted, and a module that folds samples into other dimensions is only found out by running it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from burstpool.errors import TraceError
from burstpool.model.buffers import kept
from burstpool.model.capture import batch_of, flatten_arguments, resize_batch
from burstpool.model.code import LayerCode
from burstpool.model.graph import BATCH, Layer, LayerGraph, Value, unique
from burstpool.model.traced import CallShape, TracedModel
from burstpool.random_state import random_state_kept


@dataclass(slots=True)
class _Call:
    """One call of a module, as it was watched."""

    path: str
    module: nn.Module
    arguments: list[Any]
    spec: pytree.TreeSpec
    results: list[Any] = field(default_factory=list)
    result_spec: pytree.TreeSpec | None = None
    children: "list[_Call]" = field(default_factory=list)
    works_itself: bool = False
    """Whether it runs any operator outside of its children, be it only to decide which of them to call."""


class ModuleCode:
    """A layer as one whole call of a module; arguments that are no tensor are as they were when watched."""

    def __init__(self, call: _Call, *, given: Sequence[int], taken: Sequence[int]) -> None:
        self._module, self._spec, self._path = call.module, call.spec, call.path
        self._arguments = [None if isinstance(x, torch.Tensor) else x for x in call.arguments]
        self._given, self._taken = given, taken
        names = [*dict(call.module.named_parameters()), *dict(call.module.named_buffers())]
        self._names = tuple(names)
        self.state = tuple(f"{call.path}.{name}".lstrip(".") for name in names)

    def __call__(self, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], batch: int) -> list[torch.Tensor]:
        leaves = list(self._arguments)
        for place, tensor in zip(self._given, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        tensors = dict(zip(self._names, state, strict=True))
        results = pytree.tree_leaves(torch.func.functional_call(self._module, tensors, args, kwargs))
        return [results[place] for place in self._taken]

    def signature(self) -> str:
        """Its place in the model, its own description and plain settings: equal text means the same module."""
        settings = [
            f"{name}.{key}={value!r}"
            for name, module in self._module.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | tuple)
        ]
        return f"{self._path} {self._module!r} {settings} {self._spec} {self._arguments}"


def trace_modules(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TracedModel:
    """Splits the model between whole modules, as far as two batches of different size run through the same ones."""
    args, kwargs = resize_batch(args, kwargs, max(2, batch_of(args, kwargs)))
    batch = batch_of(args, kwargs)
    root = _watch(model, args, kwargs)
    larger = _watch(model, *resize_batch(args, kwargs, batch + 1))
    calls, others = _split(root), _split(larger)
    if [call.path for call in calls] != [call.path for call in others]:
        calls, others = [root], [larger]  # which modules run depends on the batch
    builder = _Builder(model, batch, root, larger)
    for call, other in zip(calls, others, strict=True):
        builder.add(call, other)
    return builder.traced((args, dict(kwargs)))


class _Builder:
    """Names what flows between the calls and puts the trace together."""

    def __init__(self, model: nn.Module, batch: int, root: _Call, larger: _Call) -> None:
        self.model, self.batch, self.root = model, batch, root
        self.trainable = any(parameter.requires_grad for parameter in model.parameters())
        self.names: dict[int, str] = {}
        self.used: set[str] = set()
        self.inputs: list[Value] = []
        self.layers: list[Layer] = []
        self.codes: list[LayerCode] = []
        for mine, theirs in zip(root.arguments, larger.arguments, strict=True):
            if isinstance(mine, torch.Tensor):
                self.names[id(mine)] = unique("input", self.used)
                self.inputs.append(self._value(mine, theirs, differentiable=False))

    def add(self, call: _Call, other: _Call) -> None:
        """One call becomes a layer."""
        name = unique(call.path or type(self.model).__name__, self.used)
        given = [i for i, leaf in enumerate(call.arguments) if isinstance(leaf, torch.Tensor)]
        taken = [i for i, leaf in enumerate(call.results) if isinstance(leaf, torch.Tensor)]
        taken = [i for i in taken if id(call.results[i]) not in self.names]
        sources = tuple(self.names[id(call.arguments[i])] for i in given)
        for order, place in enumerate(taken):
            self.names[id(call.results[place])] = f"{name}:{order}" if order else name
        outputs = tuple(self._value(call.results[i], other.results[i], differentiable=self.trainable) for i in taken)
        self.layers.append(self._layer(name, call, sources, outputs))
        self.codes.append(ModuleCode(call, given=given, taken=taken))

    def traced(self, example: tuple[tuple[Any, ...], dict[str, Any]]) -> TracedModel:
        """The trace of all calls added."""
        root, names = self.root, self.names
        results = [(names.get(id(x)), None if id(x) in names else x) for x in root.results]
        if any(name is None and isinstance(x, torch.Tensor) for name, x in results):
            raise TraceError(f"{type(self.model).__name__} returns a tensor that none of its modules makes")
        graph = LayerGraph(
            model=type(self.model).__name__,
            training=self.model.training,
            inputs=tuple(self.inputs),
            layers=tuple(self.layers),
            outputs=tuple(dict.fromkeys(name for name, _ in results if name is not None)),
        )
        assert root.result_spec is not None
        call = CallShape(
            inputs=[names[id(leaf)] if isinstance(leaf, torch.Tensor) else "" for leaf in root.arguments],
            in_spec=root.spec,
            outputs=results,
            out_spec=root.result_spec,
            values=self.inputs,
            example=example,
        )
        return TracedModel(model=self.model, graph=graph, codes=self.codes, call=call, example=example)

    def _layer(self, name: str, call: _Call, sources: tuple[str, ...], outputs: tuple[Value, ...]) -> Layer:
        first_names = {id(parameter): key for key, parameter in self.model.named_parameters()}
        norms = (nn.modules.batchnorm._BatchNorm,)
        return Layer(
            name=name,
            kind=type(call.module).__name__,
            inputs=sources,
            outputs=outputs,
            parameters={first_names[id(p)]: p.numel() * p.element_size() for p in call.module.parameters()},
            buffers=tuple(f"{call.path}.{key}".lstrip(".") for key, _ in call.module.named_buffers()),
            random=any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training for m in call.module.modules()),
            mixes_samples=any(isinstance(m, norms) and m.training for m in call.module.modules()),
        )

    def _value(self, tensor: torch.Tensor, larger: torch.Tensor, *, differentiable: bool) -> Value:
        """What grows when the batch does are the samples."""
        growing = [dim for dim, (a, b) in enumerate(zip(tensor.shape, larger.shape, strict=True)) if a != b]
        dim = growing[0] if len(growing) == 1 and tensor.shape[growing[0]] == self.batch else None
        size, more = (x.numel() * x.element_size() for x in (tensor, larger))
        return Value(
            name=self.names[id(tensor)],
            shape=tuple(BATCH if i == dim else s for i, s in enumerate(tensor.shape)),
            dtype=str(tensor.dtype).removeprefix("torch."),
            sample_dim=dim,
            bytes_per_sample=more - size,
            fixed_bytes=max(0, size - self.batch * (more - size)),
            differentiable=differentiable and tensor.is_floating_point(),
        )


def _watch(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
    """Runs the model once on copies of its buffers, recording every module call."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, dict(kwargs)))  # it may overwrite them
    leaves, spec = flatten_arguments(args, kwargs)
    root = _Call("", model, leaves, spec)
    open_calls = [root]
    handles = []

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = _Call(path, module, *flatten_arguments(args, kwargs))
            open_calls[-1].children.append(call)
            open_calls.append(call)

        return hook

    def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        call = open_calls.pop()
        call.results, call.result_spec = pytree.tree_flatten(result)

    try:
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
        with kept(model), random_state_kept(), torch.no_grad(), _Watcher(open_calls):
            result = model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    root.results, root.result_spec = pytree.tree_flatten(result)
    return root


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which module call runs each operator."""

    def __init__(self, open_calls: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open_calls = open_calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._open_calls[-1].works_itself = True
        return func(*args, **(kwargs or {}))


def _split(call: _Call) -> list[_Call]:
    """The call's children, split in turn, where they alone make its result; else the call itself."""
    if call.works_itself:
        return [call]
    known = {id(leaf) for leaf in call.arguments if isinstance(leaf, torch.Tensor)}
    for child in call.children:
        if any(isinstance(leaf, torch.Tensor) and id(leaf) not in known for leaf in child.arguments):
            return [call]
        made = {id(leaf) for leaf in child.results if isinstance(leaf, torch.Tensor)}
        if made & known:
            return [call]  # written in place: who reads it before and who after cannot be told
        known |= made
    if not call.children or any(isinstance(x, torch.Tensor) and id(x) not in known for x in call.results):
        return [call]
    return [part for child in call.children for part in _split(child)]
