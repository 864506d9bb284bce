"""FLOPs: floating-point operations of matrix products, convolutions, attention and recurrent layers.

Takes captured operators. Returns forward operations a sample, a multiply-add counted as two, as torch's own
counter does. Element-wise work is not counted: it is bound by memory, not by arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from burstpool.model.capture import BATCH_SYMBOL, Capture

aten = torch.ops.aten
_RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
"""What torch's counter does not know."""


def flops_per_sample(nodes: Sequence[fx.Node], capture: Capture) -> int:
    """Forward operations of these nodes for one sample."""
    total: Any = 0
    for node in nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        total = total + (_recurrent(node) if node.target in _RECURRENT else _counted(node))
    size = capture.size(total)
    return size if isinstance(size, int) else int(size.subs(BATCH_SYMBOL, 1))


def _counted(node: fx.Node) -> Any:
    args = map_arg(node.args, lambda source: source.meta["val"])
    kwargs = map_arg(node.kwargs, lambda source: source.meta["val"])
    mode = next((v.fake_mode for v in _tensors(args) if hasattr(v, "fake_mode")), None)
    if mode is None:
        return 0
    with mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
        node.target(*args, **kwargs)  # type: ignore[operator]
    return counter.get_total_flops()


def _tensors(arguments: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(arguments)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _recurrent(node: fx.Node) -> Any:
    """Two operations a weight of every matrix, a time step and a sample."""
    source, weights = node.args[0], node.args[2]
    assert isinstance(source, fx.Node) and isinstance(weights, list | tuple)
    steps_times_samples = source.meta["val"].shape[0] * source.meta["val"].shape[1]
    matrices = [w.meta["val"] for w in weights if isinstance(w, fx.Node) and w.meta["val"].dim() == 2]
    return sum(2 * matrix.numel() * steps_times_samples for matrix in matrices)
