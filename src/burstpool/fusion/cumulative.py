"""Batch norm with momentum=None, which averages over all batches there were, as operators that can be captured.

torch reads the number of batches into Python, where a captured graph cannot follow. Here it stays a tensor: batch norm
writes the batch's own statistics into new memory, from where the running ones take their share. Norms with a forward of
their own are left as they are.

Shapes: C = channels.
"""
# ruff: noqa: N806 -- shape suffixes are capitals

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def cumulative_norms_as_tensors(model: nn.Module) -> Iterator[None]:
    """While it lasts, such norms of the model run `_averaging_over_all_batches`."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and _averages(m) and _is_torchs_own(m)]
    for norm in norms:
        norm.forward = partial(_averaging_over_all_batches, norm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def cumulative_norm(model: nn.Module) -> str | None:
    """The name of the first norm that averages over all batches."""
    found = (name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and _averages(module))
    return next(found, None)


def _averages(norm: _BatchNorm) -> bool:
    return norm.training and norm.momentum is None and norm.num_batches_tracked is not None


def _is_torchs_own(norm: _BatchNorm) -> bool:
    return type(norm).forward is _BatchNorm.forward and "forward" not in vars(norm)


def _averaging_over_all_batches(norm: _BatchNorm, x: Tensor) -> Tensor:
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]
    mean, var, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None
    assert var is not None
    assert batches is not None
    batches.add_(1)
    mean_C, var_C = torch.zeros_like(mean), torch.zeros_like(var)
    y = F.batch_norm(x, mean_C, var_C, norm.weight, norm.bias, training=True, momentum=1.0, eps=norm.eps)
    share = batches.double().reciprocal().to(mean.dtype)
    mean.lerp_(mean_C, share)
    var.lerp_(var_C, share)
    return y
