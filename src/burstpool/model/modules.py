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
from burstpool.model.capture import batch_of, flatten_arguments, resize_batch
from burstpool.model.graph import BATCH, Layer, LayerGraph, Value
from burstpool.model.traced import CallShape, TracedModel


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
        """The module's own description."""
        return f"{self._module!r} {self._spec} {self._arguments}"


def trace_modules(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TracedModel:
    """Splits the model between whole modules."""
    args, kwargs = resize_batch(args, kwargs, max(2, batch_of(args, kwargs)))
    batch = batch_of(args, kwargs)
    root = _watch(model, args, kwargs)
    calls = _split(root)
    inputs = [leaf for leaf in root.arguments if isinstance(leaf, torch.Tensor)]
    names: dict[int, str] = {id(tensor): f"input{i}" if i else "input" for i, tensor in enumerate(inputs)}
    wanted = {id(leaf) for call in [*calls, root] for leaf in (call.arguments if call is not root else root.results)}
    trainable = any(parameter.requires_grad for parameter in model.parameters())
    layers, codes, used = [], [], set(names.values())
    for call in calls:
        name = _unique(call.path or type(model).__name__, used)
        given = [i for i, leaf in enumerate(call.arguments) if isinstance(leaf, torch.Tensor)]
        taken = [i for i, leaf in enumerate(call.results) if isinstance(leaf, torch.Tensor) and id(leaf) in wanted]
        sources = tuple(names[id(call.arguments[i])] for i in given)
        for order, place in enumerate(taken):
            names[id(call.results[place])] = f"{name}:{order}" if order else name
        outputs = tuple(_value(names[id(call.results[i])], call.results[i], batch, trainable) for i in taken)
        layers.append(_layer(name, call, sources, outputs))
        codes.append(ModuleCode(call, given=given, taken=taken))
    values = tuple(_value(names[id(tensor)], tensor, batch, False) for tensor in inputs)
    results = [(names.get(id(x)), x if id(x) not in names else None) for x in root.results]
    if any(name is None and isinstance(x, torch.Tensor) for name, x in results):
        raise TraceError(f"{type(model).__name__} returns a tensor that none of its modules makes")
    graph = LayerGraph(
        model=type(model).__name__,
        training=model.training,
        inputs=values,
        layers=tuple(layers),
        outputs=tuple(dict.fromkeys(name for name, _ in results if name is not None)),
    )
    assert root.result_spec is not None
    call_shape = CallShape(
        inputs=[names.get(id(leaf), "") if isinstance(leaf, torch.Tensor) else "" for leaf in root.arguments],
        in_spec=root.spec,
        outputs=results,
        out_spec=root.result_spec,
        sample_dims={value.name: value.sample_dim for value in values},
    )
    return TracedModel(model=model, graph=graph, codes=codes, call=call_shape, example=(args, dict(kwargs)))


def _watch(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
    """Runs the model once on copies of its buffers, recording every module call."""
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

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
        with torch.random.fork_rng(), torch.no_grad(), _Watcher(open_calls):
            result = model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
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


def _layer(name: str, call: _Call, sources: tuple[str, ...], outputs: tuple[Value, ...]) -> Layer:
    def key(name: str) -> str:
        return f"{call.path}.{name}".lstrip(".")

    norms = (nn.modules.batchnorm._BatchNorm,)
    return Layer(
        name=name,
        kind=type(call.module).__name__,
        inputs=sources,
        outputs=outputs,
        parameters={key(n): p.numel() * p.element_size() for n, p in call.module.named_parameters()},
        buffers=tuple(key(n) for n, _ in call.module.named_buffers()),
        random=any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training for m in call.module.modules()),
        mixes_samples=any(isinstance(m, norms) and m.training for m in call.module.modules()),
    )


def _value(name: str, tensor: torch.Tensor, batch: int, trainable: bool) -> Value:
    dims = [dim for dim, size in enumerate(tensor.shape) if size == batch]
    dim = dims[0] if dims else None
    size = tensor.numel() * tensor.element_size()
    return Value(
        name=name,
        shape=tuple(BATCH if i == dim else s for i, s in enumerate(tensor.shape)),
        dtype=str(tensor.dtype).removeprefix("torch."),
        sample_dim=dim,
        bytes_per_sample=size // batch if dim is not None else 0,
        fixed_bytes=size if dim is None else 0,
        differentiable=trainable and tensor.is_floating_point(),
    )


def _unique(name: str, used: set[str]) -> str:
    count = 1
    while (unique := name if count == 1 else f"{name}@{count}") in used:
        count += 1
    used.add(unique)
    return unique
