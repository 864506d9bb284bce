"""Linear layers and matrix products: one batched product, or one wide product where members share their input.

Shapes: M = members, P = all dimensions before the last, I = inputs, O = outputs.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

import string
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burstpool.fusion import kernels
from burstpool.fusion.memory import KeptMemory
from burstpool.fusion.padding import ALIGNED, made_of, padded_outputs, whole
from burstpool.fusion.rules.base import Call, Lowered, Rule, Run, autocast_dtype, padded, with_members
from burstpool.fusion.rules.rounding import products_may_round

aten = torch.ops.aten


def _linear(call: Call) -> Lowered | None:
    x, weight, bias = call.is_batched("input"), call.is_batched("weight"), call.is_batched("bias")
    if call.rank("weight") != 2:
        return None
    if not weight:
        return None if bias else Lowered(kernel=lambda run, *a: aten.linear(*a), why="all members use one weight")
    if call["bias"] is not None and not bias:
        return None
    if not x:
        return Lowered(kernel=linear_shared, why="one wide product: members share the input")
    if call.rank("input") < 1:
        return None
    return Lowered(kernel=linear_batched, why="one batched product")


def linear_shared(run: Run, x: Tensor, w_MOI: Tensor, b_MO: Tensor | None) -> Tensor:
    """[M, …, O] of an input […, I] that members share."""
    if w_MOI.device.type == "cpu" and w_MOI.numel() >= _MANY_WEIGHTS:
        x = x.to(autocast_dtype(x))
        return linear_batched(run, x.expand(run.members, *x.shape), w_MOI, b_MO)
    bias = None if b_MO is None else b_MO.flatten()
    y = torch.nn.functional.linear(x, w_MOI.flatten(0, 1), bias)
    return y.view(*y.shape[:-1], run.members, w_MOI.shape[1]).movedim(-2, 0)


def linear_batched(run: Run, x: Tensor, w_MOI: Tensor, b_MO: Tensor | None) -> Tensor:
    """[M, …, O] of members' own inputs [M, …, I]."""
    x_MPI = x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
    dtype = autocast_dtype(x)
    outputs, weight, bias = w_MOI.shape[1], w_MOI.to(dtype), None if b_MO is None else b_MO.to(dtype)
    if missing := _missing(outputs, weight):
        weight, bias = padded_outputs(weight, missing), None if bias is None else padded_outputs(bias, missing)
    shape = (*x.shape[:-1], outputs)
    y: Tensor = _BatchedLinear.apply(x_MPI.to(dtype), weight, bias, shape, run.memory)  # type: ignore[no-untyped-call]
    return y


class _BatchedLinear(torch.autograd.Function):
    """x [M, P, I] times w [M, O, I], plus b [M, O], in the given shape; what it has no room for of the O is padding.

    torch's own gradient of the weight comes out transposed and is copied to be accumulated; here it is in its place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MPI: Tensor,
        w_MOI: Tensor,
        b_MO: Tensor | None,
        shape: tuple[int, ...],
        memory: KeptMemory | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x_MPI, w_MOI)
        ctx.memory = memory
        w_MIO = w_MOI.transpose(1, 2)
        if b_MO is None:
            return _shaped(torch.bmm(x_MPI, w_MIO), shape)
        if kernels.plain():  # a compiler adds the bias where it reads the result
            product_MPO = torch.bmm(x_MPI, w_MIO)
            return made_of(_shaped(product_MPO + b_MO.unsqueeze(1), shape), product_MPO, b_MO)
        return _shaped(torch.baddbmm(b_MO.unsqueeze(1), x_MPI, w_MIO), shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x_MPI, w_MOI = (saved.conj() for saved in ctx.saved_tensors)  # itself where it is real
        g_MPO = whole(grads[0].reshape(*x_MPI.shape[:2], grads[0].shape[-1]), w_MOI.shape[1])
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        return (
            torch.bmm(g_MPO, w_MOI) if wants_x else None,
            _BatchedLinear._weight_gradient(g_MPO, x_MPI, w_MOI, ctx.memory) if wants_w else None,
            g_MPO.sum(1) if wants_b else None,
            None,
            None,
        )

    @staticmethod
    def _weight_gradient(g_MPO: Tensor, x_MPI: Tensor, w_MOI: Tensor, memory: KeptMemory | None) -> Tensor:
        g_MPO, x_MPI = _along_the_sum(g_MPO, x_MPI)
        g_MOP = g_MPO.transpose(1, 2)
        if memory is None or torch.is_grad_enabled():  # no gradient of what was written into given memory
            return torch.bmm(g_MOP, x_MPI)
        return torch.bmm(g_MOP, x_MPI, out=memory.empty(w_MOI.shape, w_MOI.dtype))


def _shaped(y_MPO: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Without padding; no view, as nobody else has the whole, and the user's code may write to it."""
    return y_MPO if y_MPO.shape == shape else y_MPO[..., : shape[-1]].view(shape).detach()


def _along_the_sum(g_MPO: Tensor, x_MPI: Tensor) -> tuple[Tensor, Tensor]:
    """Both, the narrower one laid with its rows innermost where the other is wide enough to make up for the copy.

    Matrix units take factors of 32 bits only along the sum, which is over rows here: with neither so a product has two
    thirds of the speed that it has with one (8 members, 4,096 rows, 512 by 2,048: 0.30 and 0.20 ms on an H200).
    """
    narrow, wide = sorted((g_MPO.shape[2], x_MPI.shape[2]))
    if wide < _WORTH_A_COPY or wide < 2 * narrow or not _rounds(x_MPI):
        return g_MPO, x_MPI
    if x_MPI.shape[2] == narrow:
        return g_MPO, x_MPI.transpose(1, 2).contiguous().transpose(1, 2)
    return g_MPO.transpose(1, 2).contiguous().transpose(1, 2), x_MPI


_WORTH_A_COPY = 1024
"""Columns of the wider factor from which on the other is laid anew."""
_MANY_WEIGHTS = 1 << 18
"""Of all members, from which on a CPU's wide product is slower than one for each: it leaves the cache."""
_WIDE = 256
"""Outputs from which on padding makes up for the copy of the weight."""


def _missing(outputs: int, like: Tensor) -> int:
    """Outputs to the next multiple that a GPU's matrix units want (padding.py)."""
    narrow = like.is_cuda and like.dtype.itemsize == 2
    return -outputs % ALIGNED if outputs >= _WIDE and (narrow or _rounds(like)) else 0


def _rounds(like: Tensor) -> bool:
    """Whether products of such factors of 32 bits run on a GPU's matrix units, as TF32."""
    return like.is_cuda and like.dtype is torch.float32 and products_may_round()


def _matmul(call: Call) -> Lowered | None:
    left, right = list(call.arguments)[:2]
    ranks = call.rank(left), call.rank(right)
    if min(ranks) < 2:
        return None  # vectors: vmap knows them
    missing = [
        max(ranks) - rank if call.is_batched(name) else 0 for name, rank in zip((left, right), ranks, strict=True)
    ]
    if not call.is_batched(left) and ranks[0] == 2 and ranks[1] == 2:
        return Lowered(kernel=_mm_shared, why="one wide product: members share the left factor")

    def kernel(run: Run, a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(padded(a, missing[0]), padded(b, missing[1]))

    return Lowered(kernel=kernel, why="one batched product")


def _mm_shared(run: Run, x_PI: Tensor, w_MIO: Tensor) -> Tensor:
    y = x_PI @ w_MIO.transpose(0, 1).flatten(1)
    return y.view(x_PI.shape[0], run.members, w_MIO.shape[2]).transpose(0, 1)


def _bmm(call: Call) -> Lowered | None:
    left, right = call.is_batched("self"), call.is_batched("mat2")

    def kernel(run: Run, a: Tensor, b: Tensor) -> Tensor:
        a = a if left else with_members(a, run.members)
        b = b if right else with_members(b, run.members)
        a, b = a.flatten(0, 1), b.flatten(0, 1)
        if b.stride(1) == 1 and b.stride(2) != 1:  # rows innermost, as a pointwise product leaves channels: stay so
            y = torch.bmm(b.transpose(1, 2), a.transpose(1, 2))
            return y.view(run.members, -1, *y.shape[1:]).transpose(2, 3)
        y = torch.bmm(a, b)
        return y.view(run.members, -1, *y.shape[1:])

    return Lowered(kernel=kernel, why="members folded into the product's batch")


def _addmm(call: Call) -> Lowered | None:
    flags = [call.is_batched(name) for name in ("self", "mat1", "mat2")]
    if call.rank("self") == 0:
        return None
    vector = call.rank("self") == 1

    def kernel(run: Run, c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
        c, a, b = (t if f else with_members(t, run.members) for t, f in zip((c, a, b), flags, strict=True))
        return torch.baddbmm(c.unsqueeze(1) if vector else c, a, b, beta=beta, alpha=alpha)

    return Lowered(kernel=kernel, why="one batched product")


def _einsum(call: Call) -> Lowered | None:
    equation: str = call["equation"].replace(" ", "")
    if "." in equation or call["path"] is not None:
        return None
    operands, _, result = equation.partition("->")
    if "->" not in equation:
        letters = operands.replace(",", "")
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    free = next((letter for letter in string.ascii_letters if letter not in equation), None)
    if free is None:
        return None
    flags = call.flags(call["tensors"])
    terms = [free + term if flag else term for term, flag in zip(operands.split(","), flags, strict=True)]
    fused = f"{','.join(terms)}->{free}{result}"
    return Lowered(kernel=lambda run, _, tensors, path: torch.einsum(fused, *tensors), why=f"einsum {fused}")


RULES: dict[Callable[..., Any], Rule] = {
    aten.linear: _linear,
    aten.matmul: _matmul,
    aten.mm: _matmul,
    aten.bmm: _bmm,
    aten.addmm: _addmm,
    aten.einsum: _einsum,
}
