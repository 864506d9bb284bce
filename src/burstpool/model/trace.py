"""Trace: from the user's module to a graph of layers, each of which can be run on its own.

Takes an unmodified `nn.Module` and an example of its arguments. Returns a `TracedModel`: the `LayerGraph` (data)
and the code of each layer, sharing the module's parameters, valid at any batch size. The module is traced in the
mode it is in: trace once in training mode and once in eval mode if you need both.
"""

from typing import Any, Literal

from torch import nn

from burstpool.errors import TraceError
from burstpool.job import model_arguments
from burstpool.model.modules import trace_modules
from burstpool.model.operators import trace_operators
from burstpool.model.traced import TracedModel

__all__ = ["TracedModel", "trace"]


def trace(model: nn.Module, example: Any, *, fallback: Literal["modules"] | None = None) -> TracedModel:
    """Splits a model into layers.

    `example` is one batch of what the model is called with: a tensor, a tuple of positional arguments or a dict of
    keyword arguments, samples along dimension 0. Where export cannot follow the code, TraceError says at which
    line; `fallback="modules"` then splits between whole modules instead, as far as they are wired one to another.
    """
    if fallback not in (None, "modules"):
        raise TraceError(f'fallback={fallback!r} is unknown; pass fallback="modules" or leave it out')
    args, kwargs = model_arguments(example)
    try:
        return trace_operators(model, args, kwargs)
    except TraceError:
        if fallback is None:
            raise
    return trace_modules(model, args, kwargs)
