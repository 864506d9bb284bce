"""Updates: torch's optimizers as formulas over all members, every number a column with one row a member.

Each function takes a `Bucket` (state and numbers), the gradients and the parameters, and returns a direction [M, P]
and how far to go along it [M, 1]. They follow torch.optim's own order of operations, so that results agree to
rounding. State is written in place, for a recorded step to find it again; weight decay that is apart from the
gradient (AdamW) is the caller's: `shrinking`.

A complex parameter is updated as torch does it: as real numbers, twice as many.

Shapes: M = members, P = all of a member's parameters in the bucket, end to end; numbers are [M, 1].
"""
# ruff: noqa: N803, N806, N815 -- shape suffixes are capitals

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def real(tensor: Tensor) -> Tensor:
    """A complex tensor [M, …] as its parts [M, …, 2], in the same memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def width(parameter: Tensor) -> int:
    """P of one stacked parameter."""
    return parameter[0].numel() * (2 if parameter.is_complex() else 1)


@dataclass(slots=True)
class Bucket:
    """Parameters that are updated together: one group, one type, the same number of steps."""

    keys: list[str]
    group: int
    numbers: dict[str, Tensor]
    """Option → [M, 1], in the parameters' type; for complex ones that of their parts."""
    flags: Mapping[str, Any]
    """Options that are no numbers, the same for all members."""
    step_M: Tensor
    """Steps each member has made, counting this one; with SGD those with momentum."""
    slots: dict[str, Tensor]
    """torch's name → [M, P], real: a complex parameter has two columns an element."""
    chunks: "list[Chunk] | None" = None
    """Pieces that fit into a CPU's cache; made when first needed."""

    def number(self, name: str) -> Tensor:
        """[M, 1]."""
        return self.numbers[name]


@dataclass(slots=True)
class Chunk:
    """Some members' rows of one parameter, as a bucket of its own."""

    key: str
    rows: slice
    bucket: Bucket


Step = tuple[Tensor, Tensor]
"""A direction [M, P] and how far to go along it [M, 1]."""
Formula = Callable[[Bucket, Tensor, Tensor], Step]


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer's formula and the state it keeps."""

    formula: Formula
    slots: Callable[[Mapping[str, Any]], Sequence[str]]
    """torch's names of its state, given the flags."""


def _gradient(bucket: Bucket, grad_MP: Tensor, param_MP: Tensor) -> Tensor:
    """Signed, with the weight decay that counts as a part of the gradient."""
    if bucket.flags.get("maximize"):
        grad_MP = -grad_MP
    if bucket.flags.get("decays") and not bucket.flags.get("decoupled_weight_decay"):
        grad_MP = torch.addcmul(grad_MP, param_MP, bucket.number("weight_decay"))
    return grad_MP


def shrinking(bucket: Bucket) -> Tensor | None:
    """[M, 1] to multiply the parameters by before the step: weight decay apart from the gradient, as AdamW has it."""
    if not (bucket.flags.get("decays") and bucket.flags.get("decoupled_weight_decay")):
        return None
    return 1 - bucket.number("lr") * bucket.number("weight_decay")


def takes_gradients_as_they_are(bucket: Bucket) -> bool:
    """Whether the direction is the gradient itself, whatever the formula: no state, no sign, no decay."""
    return not bucket.slots and not bucket.flags.get("maximize") and not bucket.flags.get("decays")


def sgd(bucket: Bucket, grad_MP: Tensor, param_MP: Tensor) -> Step:
    """torch.optim.SGD."""
    grad_MP = _gradient(bucket, grad_MP, param_MP)
    if bucket.flags["has_momentum"]:
        buffer = _with_momentum(bucket, _damped(bucket, grad_MP))
        nesterov = bucket.flags.get("nesterov")
        grad_MP = torch.addcmul(grad_MP, buffer, bucket.number("momentum")) if nesterov else buffer
    return grad_MP, -bucket.number("lr")


def _with_momentum(bucket: Bucket, grad_MP: Tensor) -> Tensor:
    """The gradient with its momentum, which goes into the buffer."""
    momentum, buffer = bucket.number("momentum"), bucket.slots["momentum_buffer"]
    if bucket.flags["all_momentum"]:
        return buffer.mul_(momentum).add_(grad_MP)
    # Where a member has no momentum torch leaves its buffer as it is, for when it has some again.
    moved = torch.addcmul(grad_MP, buffer, momentum)
    buffer.copy_(torch.where(momentum == 0, buffer, moved))
    return moved


def _damped(bucket: Bucket, grad_MP: Tensor) -> Tensor:
    """The gradient's share in the momentum: undamped at the first step, and without momentum."""
    if not bucket.flags["damps"]:
        return grad_MP
    undamped = (bucket.step_M <= 1).unsqueeze(1) | (bucket.number("momentum") == 0)
    return torch.where(undamped, grad_MP, grad_MP * bucket.number("dampening_rest"))


def adam(bucket: Bucket, grad_MP: Tensor, param_MP: Tensor) -> Step:
    """torch.optim.Adam and AdamW, with amsgrad."""
    grad_MP = _gradient(bucket, grad_MP, param_MP)
    mean = bucket.slots["exp_avg"].lerp_(grad_MP, bucket.number("beta1_rest"))
    square = _averaged_square(bucket, "exp_avg_sq", grad_MP, "beta2")
    # In double precision, as torch has them as Python numbers.
    step_M1 = bucket.step_M.unsqueeze(1)
    correction1 = 1 - bucket.number("beta1_exact") ** step_M1
    correction2 = (1 - bucket.number("beta2_exact") ** step_M1).sqrt()
    if bucket.flags.get("amsgrad"):
        largest = bucket.slots["max_exp_avg_sq"]
        square = torch.maximum(largest, square, out=largest)
    denominator = square.sqrt().div_(correction2.to(grad_MP.dtype)).add_(bucket.number("eps"))
    size_M1 = (bucket.number("lr_exact") / correction1).to(grad_MP.dtype)
    return torch.div(mean, denominator, out=denominator), -size_M1


def _averaged_square(bucket: Bucket, name: str, grad_MP: Tensor, keep: str) -> Tensor:
    """The running mean of the gradient's square, in place; `keep` is the number that says how much stays."""
    return bucket.slots[name].mul_(bucket.number(keep)).addcmul_(grad_MP, grad_MP * bucket.number(f"{keep}_rest"))


def adadelta(bucket: Bucket, grad_MP: Tensor, param_MP: Tensor) -> Step:
    """torch.optim.Adadelta."""
    grad_MP = _gradient(bucket, grad_MP, param_MP)
    rho, eps = bucket.number("rho"), bucket.number("eps")
    square = _averaged_square(bucket, "square_avg", grad_MP, "rho")
    moved = bucket.slots["acc_delta"]
    delta = (moved + eps).sqrt_() / (square + eps).sqrt_() * grad_MP
    moved.mul_(rho).addcmul_(delta, delta * bucket.number("rho_rest"))
    return delta, -bucket.number("lr")


def rmsprop(bucket: Bucket, grad_MP: Tensor, param_MP: Tensor) -> Step:
    """torch.optim.RMSprop, centered and with momentum."""
    grad_MP = _gradient(bucket, grad_MP, param_MP)
    square = _averaged_square(bucket, "square_avg", grad_MP, "alpha")
    if bucket.flags.get("centered"):
        mean = bucket.slots["grad_avg"].lerp_(grad_MP, bucket.number("alpha_rest"))
        square = torch.addcmul(square, mean, mean, value=-1)
    moved = grad_MP / (square.sqrt() + bucket.number("eps"))
    if bucket.flags["has_momentum"]:
        moved = _with_momentum(bucket, moved)
    return moved, -bucket.number("lr")


def adagrad(bucket: Bucket, grad_MP: Tensor, param_MP: Tensor) -> Step:
    """torch.optim.Adagrad."""
    grad_MP = _gradient(bucket, grad_MP, param_MP)
    total = bucket.slots["sum"].addcmul_(grad_MP, grad_MP)
    lr_M1 = bucket.number("lr_exact") / (1 + (bucket.step_M.unsqueeze(1) - 1) * bucket.number("lr_decay_exact"))
    return grad_MP / (total.sqrt() + bucket.number("eps")), -lr_M1.to(grad_MP.dtype)


def _momentum(flags: Mapping[str, Any]) -> list[str]:
    return ["momentum_buffer"] if flags["has_momentum"] else []


_ADAM = Update(adam, lambda f: ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if f.get("amsgrad") else [])])

UPDATES: dict[type[torch.optim.Optimizer], Update] = {
    torch.optim.SGD: Update(sgd, _momentum),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adadelta: Update(adadelta, lambda f: ["square_avg", "acc_delta"]),
    torch.optim.RMSprop: Update(
        rmsprop, lambda f: ["square_avg", *(["grad_avg"] if f.get("centered") else []), *_momentum(f)]
    ),
    torch.optim.Adagrad: Update(adagrad, lambda f: ["sum"]),
}
"""torch's class → formula. Any other class runs as M optimizers of its own."""
