"""Capture: the user's module as one flat operator graph that runs at any batch size.

Takes a module and example arguments. Returns a `Capture`: torch.export's graph, each operator marked with the
module call that made it, and what of it depends on samples, parameters or nothing at all. Captures the mode
(train or eval) the module is in. Raises TraceError naming the user's line where export cannot follow the code.
"""

import contextlib
import functools
import inspect
import io
import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from burstpool.errors import TraceError
from burstpool.model.buffers import kept
from burstpool.model.graph import BATCH

BATCH_SYMBOL = sympy.Symbol(BATCH, integer=True, positive=True)
_IGNORED = {  # checks that export leaves behind; they compute nothing
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.sym_constrain_range.default,
}

_MAYBE_COPIES = {
    torch.ops.aten.reshape,
    torch.ops.aten.contiguous,
    torch.ops.aten.flatten,
    torch.ops.aten.unflatten,
    torch.ops.aten.to,
    torch.ops.aten.type_as,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A flat graph and what its placeholders stand for."""

    graph: fx.Graph
    root: nn.Module
    """Holds what `get_attr` nodes name: the bodies of autocast and no_grad regions."""
    parameters: Mapping[str, str]
    """Placeholder → state-dict key."""
    buffers: Mapping[str, str]
    """Placeholder → state-dict key."""
    constants: Mapping[str, Any]
    """Placeholder → tensor that the user's code made outside of any parameter or buffer."""
    inputs: tuple[str, ...]
    """Placeholders of the tensors the model is called with, in flattened order; "" for arguments that are no tensor."""
    outputs: tuple[Any, ...]
    """The flattened results: nodes, or plain values."""
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    batch_range: tuple[int, int | None]
    """The smallest and largest batch the captured code is valid for; None for no largest."""
    batch_symbols: frozenset[sympy.Symbol]
    """What export calls the batch; a symbol an input."""

    def size(self, size: Any) -> int | sympy.Expr:
        """A size as an int, or as an expression in the batch."""
        if isinstance(size, torch.SymInt):
            expression = size.node.expr.subs(dict.fromkeys(self.batch_symbols, BATCH_SYMBOL))
            return int(expression) if expression.is_Integer else expression
        return int(size)

    def data_dependent(self, expression: Any) -> bool:
        """Whether a size depends on the values in a tensor, not only on the batch."""
        return isinstance(expression, sympy.Expr) and bool(expression.free_symbols - {BATCH_SYMBOL})


def flatten_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The arguments in the order of the graph's placeholders."""
    return pytree.tree_flatten((tuple(args), dict(kwargs)))


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Capture:
    """Exports the model with dimension 0 of every batched input left open."""
    args, kwargs = _at_least_two_samples(args, kwargs)
    program = _export(model, args, kwargs)
    for node in reversed(program.graph.nodes):
        if node.target in _IGNORED:
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code(is_impure_node=_is_impure)
    _mark_copies(program.graph)
    signature = program.graph_signature
    stored = {kind: {s.arg.name: str(s.target) for s in signature.input_specs if s.kind is kind} for kind in InputKind}
    constants = stored[InputKind.CONSTANT_TENSOR] | stored[InputKind.CUSTOM_OBJ]
    symbols = frozenset(_batch_symbols(program))
    if not symbols:
        raise TraceError(_fixed_batch(model))
    return Capture(
        graph=program.graph,
        root=program.graph_module,
        parameters=stored[InputKind.PARAMETER],
        buffers=stored[InputKind.BUFFER],
        constants={name: program.constants[target] for name, target in constants.items()},
        inputs=tuple(_tensor_inputs(program)),
        outputs=tuple(_outputs(program, model)),
        in_spec=flatten_arguments(args, kwargs)[1],
        out_spec=program.call_spec.out_spec,
        batch_range=_batch_range(program, symbols),
        batch_symbols=symbols,
    )


def batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Samples in the arguments: size 0 of the first tensor."""
    for leaf in flatten_arguments(args, kwargs)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise TraceError("the example holds no tensor with a batch dimension; pass e.g. torch.randn(4, 3, 224, 224)")


def resize_batch(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with their samples repeated, or cut, to `batch` of them."""
    return resize_samples((tuple(args), dict(kwargs)), batch_of(args, kwargs), batch)  # type: ignore[no-any-return]


def resize_samples(tree: Any, old: int, new: int) -> Any:
    """Every tensor of `old` samples in the structure, repeated or cut to `new` of them."""

    def resize(leaf: Any) -> Any:
        if not _is_batched(leaf, old) or old == new:
            return leaf
        return leaf.repeat(-(-new // old), *[1] * (leaf.dim() - 1))[:new]

    return pytree.tree_map(resize, tree)


def _is_batched(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch


def _at_least_two_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # export takes a size of 1 for a broadcast and would fix it.
    return resize_batch(args, kwargs, max(2, batch_of(args, kwargs)))


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.export.ExportedProgram:
    batch = batch_of(args, kwargs)

    def open_batch(leaf: Any) -> Any:
        return {0: torch.export.Dim.DYNAMIC} if _is_batched(leaf, batch) else None

    signature = inspect.signature(model.forward)
    try:
        named = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TraceError(f"{type(model).__name__}.forward does not take this example: {error}") from None
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and parameter.name in named:  # torch.export loses count
            what = f"forward takes {', '.join(map(repr, named[parameter.name]))} by **{parameter.name}"
            raise TraceError(_message(model, "", what, "name it in forward's signature, or leave it out"))
    shapes = {name: pytree.tree_map(open_batch, value) for name, value in named.items()}
    try:
        with kept(model), _silence(), _own_backwards() as functions:
            program = torch.export.export(model, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise TraceError(_explain(error, model)) from error
    if functions:
        what, change = functions[0]
        raise TraceError(
            f"cannot trace {type(model).__name__}: it calls {what}, whose own backward a captured graph would drop; "
            f'{change}, or pass fallback="modules"'
        )
    return program


@contextlib.contextmanager
def _own_backwards() -> Iterator[list[tuple[str, str]]]:
    """Functions with a backward of their own that are called meanwhile, and what to do instead.

    Of torch's own only checkpointing that runs a part without gradients; the others are what they seem.
    """
    found: list[tuple[str, str]] = []
    whole = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            found.append(("checkpoint(…, use_reentrant=True)", "pass use_reentrant=False"))
        elif torch.is_grad_enabled() and cls.__module__.partition(".")[0] != "torch":
            name = f"{cls.__qualname__}, an autograd.Function"
            found.append((name, "write it in operators that torch can differentiate"))
        return whole.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield found
    finally:
        torch.autograd.Function.apply = whole  # type: ignore[method-assign]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What export cannot follow is said once, by our error; torch would print it several times before."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")  # torch's own notes on its internals
            yield
    finally:
        logging.disable(before)


def inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The operators inside of a region (`no_grad`, `autocast`) that export keeps as one node; none for others."""
    for source in node.all_input_nodes if node.op == "call_function" else ():
        if source.op == "get_attr" and node.graph.owning_module is not None:
            body = getattr(node.graph.owning_module, str(source.target))
            if isinstance(body, fx.GraphModule):
                for inner in body.graph.nodes:
                    yield inner
                    yield from inner_nodes(inner)


def _mark_copies(graph: fx.Graph) -> None:
    """`meta["copies"]` on operators that may hand on their input's own memory but gave new memory when captured."""
    inside = [inner for region in graph.nodes for inner in inner_nodes(region)]
    for node in [*graph.nodes, *inside]:
        if getattr(node.target, "overloadpacket", None) in _MAYBE_COPIES:
            mine, source = node.meta["val"], node.args[0].meta["val"]
            node.meta["copies"] = mine.untyped_storage()._cdata != source.untyped_storage()._cdata


def writes(node: fx.Node) -> bool:
    """Whether it, or anything inside of it, overwrites memory."""
    own = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return own or any(writes(inner) for inner in inner_nodes(node))


def is_random(node: fx.Node) -> bool:
    """Whether it draws from the random stream, so that its place in the order matters."""
    own = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return own or any(is_random(inner) for inner in inner_nodes(node))


def _is_impure(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or writes(node) or is_random(node)


def _tensor_inputs(program: torch.export.ExportedProgram) -> Iterator[str]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            name = getattr(spec.arg, "name", "")
            yield name if isinstance(values.get(name), torch.Tensor) else ""


def _outputs(program: torch.export.ExportedProgram, model: nn.Module) -> Iterator[Any]:
    results = program.graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            yield result
        else:
            raise TraceError(
                f"{type(model).__name__} writes to {spec.target or 'its input'} in a way that cannot be kept apart "
                'by layers; return the new value instead, or pass fallback="modules"'
            )


def _batch_symbols(program: torch.export.ExportedProgram) -> Iterator[sympy.Symbol]:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt):
                    yield from size.node.expr.free_symbols


def _batch_range(program: torch.export.ExportedProgram, symbols: frozenset[sympy.Symbol]) -> tuple[int, int | None]:
    low, high = 1, None
    for symbol in symbols:
        allowed = program.range_constraints.get(symbol)
        if allowed is None:
            continue
        if allowed.lower.is_Integer and int(allowed.lower) > 2:  # 2 only means "not a broadcast"
            low = max(low, int(allowed.lower))
        if allowed.upper.is_Integer and int(allowed.upper) < 2**31:
            high = min(high or int(allowed.upper), int(allowed.upper))
    return low, high


@functools.cache
def _torch_folder() -> str:
    return str(Path(torch.__file__).parent) + os.sep


def _explain(error: Exception, model: nn.Module) -> str:
    """One line: where in the user's code, what, and what to change."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_torch_folder(), str(Path(__file__).parent), "<"))
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else _named_line(str(error))
    kind, text = type(error).__name__, str(error)
    if "specialized it to be a constant" in text or "ConstraintViolation" in kind:
        return _fixed_batch(model, where)
    if "DataDependent" in kind or "data-dependent" in text or "_local_scalar_dense" in text:
        what = "the code branches on, or sizes something by, a value inside a tensor"
        change = "use torch.where, masks or torch.cond instead"
    elif "fake tensor in the exported program constant" in text:
        what = "a tensor leaves what can be traced, as by .data"
        change = "use torch.no_grad() or .detach() instead"
    else:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
        what, change = f"{kind}: {first[:200]}", "rewrite that line with tensor operations"
    return _message(model, where, what, change)


def _fixed_batch(model: nn.Module, where: str = "") -> str:
    change = "take sizes from the tensors (x.shape[0], view(x.shape[0], …)), not from constants"
    return _message(model, where, "the code fixes the batch size", change)


def _message(model: nn.Module, where: str, what: str, change: str) -> str:
    where = f" at {where}" if where else ""
    return f'cannot trace {type(model).__name__}{where}: {what}; {change}, or pass fallback="modules"'


def _named_line(text: str) -> str:
    """Where export's message itself names the line."""
    found = [
        match
        for match in re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.+)', text)
        if not match[0].startswith((_torch_folder(), "torch/"))
    ]
    return f"{found[-1][0]}:{found[-1][1]}: `{found[-1][2].strip()}`" if found else ""
