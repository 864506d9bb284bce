"""The optimizer's step in one pass: read gradient, weight and state once, write weight and state once.

Formulas as in fusion/updates.py, for SGD, Adam and AdamW; parameters in float32. A member that does not step is not
touched at all, its state included.

Shapes: M = members, P = elements of one parameter of a member; state is [M, all parameters' P] with offsets.
"""
# ruff: noqa: N803, N806 -- shape suffixes and what a kernel is compiled for are capitals

from collections.abc import Callable, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from burstpool.fusion.updates import Bucket

_BLOCK = 2048


@triton.jit
def _sgd(
    param,
    grad,
    momentum_buffer,
    lr,
    momentum,
    dampening_rest,
    weight_decay,
    mask,
    step,
    size,
    grad_row,
    row,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    DAMPS: tl.constexpr,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    member = tl.program_id(1)
    if tl.load(mask + member) == 0:
        return
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    at = member.to(tl.int64) * size + place
    p = tl.load(param + at, mask=inside)
    g = tl.load(grad + member.to(tl.int64) * grad_row + place, mask=inside).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if DECAYS:
        g += p * tl.load(weight_decay + member)
    if MOMENTUM:
        keep = tl.load(momentum + member)
        slot = momentum_buffer + member.to(tl.int64) * row + place
        share = g
        if DAMPS:
            undamped = (tl.load(step + member) <= 1) | (keep == 0)
            share = tl.where(undamped, g, g * tl.load(dampening_rest + member))
        before = tl.load(slot, mask=inside)
        b = before * keep + share
        tl.store(slot, tl.where(keep == 0, before, b), mask=inside)  # without momentum torch leaves it as it is
        g = g + b * keep if NESTEROV else b
    tl.store(param + at, p - g * tl.load(lr + member), mask=inside)


@triton.jit
def _adam(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    beta1_rest,
    beta2,
    beta2_rest,
    eps,
    size_of_step,
    root,
    weight_decay,
    shrink,
    mask,
    size,
    grad_row,
    row,
    AMSGRAD: tl.constexpr,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    member = tl.program_id(1)
    if tl.load(mask + member) == 0:
        return
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    at = member.to(tl.int64) * size + place
    slot = member.to(tl.int64) * row + place
    p = tl.load(param + at, mask=inside)
    g = tl.load(grad + member.to(tl.int64) * grad_row + place, mask=inside).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if DECAYS:
        if DECOUPLED:
            p = p * tl.load(shrink + member)
        else:
            g += p * tl.load(weight_decay + member)
    mean = tl.load(exp_avg + slot, mask=inside)
    mean += (g - mean) * tl.load(beta1_rest + member)
    square = tl.load(exp_avg_sq + slot, mask=inside) * tl.load(beta2 + member)
    square += g * (g * tl.load(beta2_rest + member))
    tl.store(exp_avg + slot, mean, mask=inside)
    tl.store(exp_avg_sq + slot, square, mask=inside)
    if AMSGRAD:
        largest = tl.load(max_exp_avg_sq + slot, mask=inside)
        square = tl.where(largest >= square, largest, square + largest * 0.0)  # NaN of either stays
        tl.store(max_exp_avg_sq + slot, square, mask=inside)
    denominator = tl.sqrt(square) / tl.load(root + member) + tl.load(eps + member)
    tl.store(param + at, p - mean / denominator * tl.load(size_of_step + member), mask=inside)


def _sgd_step(bucket: Bucket, mask_M: Tensor) -> Callable[[Tensor, Tensor, int], None]:
    flags, numbers = bucket.flags, bucket.numbers
    lr = numbers["lr"]
    buffer = bucket.slots.get("momentum_buffer")
    options = {
        "MOMENTUM": bool(flags["has_momentum"]),
        "NESTEROV": bool(flags.get("nesterov")),
        "DAMPS": bool(flags["damps"]),
        "DECAYS": bool(flags.get("decays")),
        "MAXIMIZE": bool(flags.get("maximize")),
    }
    columns = [numbers.get(name, lr) for name in ("momentum", "dampening_rest", "weight_decay")]

    def run(param: Tensor, grad: Tensor, offset: int) -> None:
        members, size = param.shape
        slot, row = (lr, 0) if buffer is None else (buffer[:, offset:], buffer.stride(0))
        grid = (triton.cdiv(size, _BLOCK), members)
        rows = grad.stride(0), row
        _sgd[grid](param, grad, slot, lr, *columns, mask_M, bucket.step_M, size, *rows, **options, BLOCK=_BLOCK)

    return run


def _adam_step(bucket: Bucket, mask_M: Tensor) -> Callable[[Tensor, Tensor, int], None]:
    flags, numbers = bucket.flags, bucket.numbers
    # In double precision, as torch has them as Python numbers.
    step_M1 = bucket.step_M.unsqueeze(1)
    correction = 1 - numbers["beta1_exact"] ** step_M1
    root = (1 - numbers["beta2_exact"] ** step_M1).sqrt().float()
    size_of_step = (numbers["lr_exact"] / correction).float()
    decays, decoupled = bool(flags.get("decays")), bool(flags.get("decoupled_weight_decay"))
    shrink = 1 - numbers["lr"] * numbers["weight_decay"] if decays and decoupled else root
    options = {
        "AMSGRAD": bool(flags.get("amsgrad")),
        "DECAYS": decays,
        "DECOUPLED": decoupled,
        "MAXIMIZE": bool(flags.get("maximize")),
    }
    mean, square = bucket.slots["exp_avg"], bucket.slots["exp_avg_sq"]
    largest = bucket.slots.get("max_exp_avg_sq", mean)
    betas = [numbers["beta1_rest"], numbers["beta2"], numbers["beta2_rest"]]
    columns = [*betas, numbers["eps"], size_of_step, root, numbers["weight_decay"], shrink]

    def run(param: Tensor, grad: Tensor, offset: int) -> None:
        members, size = param.shape
        slots = [slot[:, offset:] for slot in (mean, square, largest)]
        grid = (triton.cdiv(size, _BLOCK), members)
        rows = grad.stride(0), mean.stride(0)
        _adam[grid](param, grad, *slots, *columns, mask_M, size, *rows, **options, BLOCK=_BLOCK)

    return run


_STEPS: Mapping[type[torch.optim.Optimizer], Callable[[Bucket, Tensor], Callable[[Tensor, Tensor, int], None]]] = {
    torch.optim.SGD: _sgd_step,
    torch.optim.Adam: _adam_step,
    torch.optim.AdamW: _adam_step,
}


def knows(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether there is a kernel for the optimizer."""
    return cls in _STEPS


def apply(
    cls: type[torch.optim.Optimizer], bucket: Bucket, parameters: Mapping[str, nn.Parameter], mask_M: Tensor
) -> None:
    """One update of the bucket's parameters, one launch for each."""
    run, members, offset = _STEPS[cls](bucket, mask_M), len(bucket.step_M), 0
    for key in bucket.keys:
        parameter = parameters[key]
        assert parameter.grad is not None
        values = parameter.detach().view(members, -1)
        # A gradient may lie in memory as it likes; gaps between members do not matter.
        gradient = parameter.grad.reshape(members, -1)
        run(values, gradient if gradient.stride(1) == 1 else gradient.contiguous(), offset)
        offset += values.shape[1]
