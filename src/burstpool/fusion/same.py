"""Whether two functions surely do the same: what members of one array must agree in beside their graphs.

A loss is called once for all members, so two jobs may share it only where it is the same code with the same values in
it. `lambda out, y: F.cross_entropy(out, y, label_smoothing=s)` has the same name whatever `s` is; its closure tells.
Whatever is not known here counts as different, which costs no more than an array of its own.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from burstpool.fusion.structure import same_attributes

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_MOST_DEPTH = 8


def same_function(first: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether both are the same code with the same values."""
    return _same(first, other, _MOST_DEPTH)


def _same(a: Any, b: Any, depth: int) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or depth == 0:
        return False
    if isinstance(a, _PLAIN):
        return bool(a == b)
    if isinstance(a, types.FunctionType):
        mine, theirs = ((f.__defaults__, f.__kwdefaults__, _closed_over(f)) for f in (a, b))
        return a.__code__ is b.__code__ and a.__globals__ is b.__globals__ and _same(mine, theirs, depth - 1)
    if isinstance(a, types.MethodType):
        return _same((a.__func__, a.__self__), (b.__func__, b.__self__), depth - 1)
    if isinstance(a, functools.partial):
        return _same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), depth - 1)
    if isinstance(a, nn.Module):
        return same_attributes(a, b) and _same(dict(a.state_dict()), dict(b.state_dict()), depth - 1)
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key], depth - 1) for key in a)
    return False


def _closed_over(function: types.FunctionType) -> list[Any]:
    try:
        return [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is not filled yet equals nothing
        return [object()]
