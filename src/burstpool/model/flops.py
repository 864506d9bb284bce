"""FLOPs: floating-point operations of matrix products, convolutions, attention and recurrent layers.

Takes captured operators. Returns forward operations a sample, a multiply-add counted as two, as torch's own
counter does. Element-wise work is not counted: it is bound by memory, not by arithmetic.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from burstpool.model.capture import BATCH_SYMBOL, Capture, inner_nodes

aten = torch.ops.aten
_RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
"""What torch's counter does not know."""
_BATCH = 2
"""Samples to count for; one would be taken for a broadcast."""


class FlopCounter:
    """Counts operators of one captured graph, on tensors that have shapes and no data."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        # Not the mode of the capture: running operators there adds guards that can fix the batch for good.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def per_sample(self, nodes: Sequence[fx.Node]) -> int:
        """Forward operations of these nodes for one sample."""
        total = 0
        with self._mode, torch.no_grad():
            for node in itertools.chain.from_iterable((node, *inner_nodes(node)) for node in nodes):
                if isinstance(node.target, torch._ops.OpOverload):
                    total += self._recurrent(node) if node.target in _RECURRENT else self._counted(node)
        return total // _BATCH

    def _counted(self, node: fx.Node) -> int:
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()) or self._is_data_dependent(node):
            return 0  # sizes are known only when it runs
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: self._concrete(source.meta.get("val")))
        with FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)  # type: ignore[operator]
        return int(counter.get_total_flops())

    def _recurrent(self, node: fx.Node) -> int:
        """Two operations a weight of every matrix, a time step and a sample."""
        source, weights = node.args[0], node.args[2]
        assert isinstance(source, fx.Node)
        assert isinstance(weights, list | tuple)
        first, second = self._concrete(source.meta["val"]).shape[:2]
        matrices = [w.meta["val"] for w in weights if isinstance(w, fx.Node) and w.meta["val"].dim() == 2]
        return sum(2 * int(matrix.numel()) * first * second for matrix in matrices)

    def _is_data_dependent(self, node: fx.Node) -> bool:
        values = [source.meta.get("val") for source in (node, *node.all_input_nodes)]
        sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
        numbers = [value for value in values if isinstance(value, torch.SymInt)]
        return any(self._capture.data_dependent(self._capture.size(size)) for size in (*sizes, *numbers))

    def _concrete(self, value: Any) -> Any:
        return pytree.tree_map(self._concrete_leaf, value)

    def _concrete_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            sizes = [self._size(size) for size in leaf.shape]
            return torch.empty(sizes, dtype=leaf.dtype, device=leaf.device)
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            expression = leaf.node.expr.subs(dict.fromkeys(self._capture.batch_symbols, _BATCH))
            return bool(expression) if isinstance(leaf, torch.SymBool) else leaf.node.pytype(expression)
        return leaf

    def _size(self, size: Any) -> int:
        found = self._capture.size(size)
        return int(found.subs(BATCH_SYMBOL, _BATCH)) if isinstance(found, sympy.Expr) else found
