"""Applying an update, by device: at once where starting an operator is dear, in pieces where memory is.

On a GPU a bucket's gradients are laid end to end, so that an update is a handful of operators however many parameters
there are. On a CPU the pieces fit into a core's cache, and nothing as large as the array is allocated: fresh memory
costs more than the arithmetic. An update that reads every gradient once and allocates nothing needs no pieces.

Shapes: M = members, P = all of a member's parameters in a bucket.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from burstpool.fusion.updates import Bucket, Chunk, Formula, real, shrinking, takes_gradients_as_they_are, width

_CHUNK_BYTES = 1 << 18
"""Of one operand; a formula touches about five."""


def apply_at_once(
    formula: Formula, bucket: Bucket, parameters: Mapping[str, nn.Parameter], mask_M: Tensor | None
) -> None:
    """One update of all parameters. Members where `mask_M` is false keep theirs."""
    members = len(bucket.step_M)
    mine = [real(parameters[key].detach()) for key in bucket.keys]
    grad_MP = _flat([_gradient(parameters[key], members) for key in bucket.keys])
    if mask_M is not None and bucket.slots:
        # NaN would stay in the state of a member that stops at it, whatever is loaded into its weights later.
        grad_MP = torch.where(mask_M.unsqueeze(1), grad_MP, torch.zeros_like(grad_MP))
    shrink_M1 = shrinking(bucket)
    needs_values = bucket.flags["decays"] and shrink_M1 is None
    param_MP = _flat([p.reshape(members, -1) for p in mine]) if needs_values else grad_MP
    direction_MP, size_M1 = formula(bucket, grad_MP, param_MP)
    delta_MP = direction_MP * size_M1
    if mask_M is not None:
        # Chosen, not multiplied: a member that stopped at NaN must stay what it was.
        delta_MP = torch.where(mask_M.unsqueeze(1), delta_MP, torch.zeros_like(delta_MP))
    if shrink_M1 is not None:
        factor_M = _masked_factor(shrink_M1, mask_M).view(-1)
        torch._foreach_mul_(mine, [factor_M.view(-1, *[1] * (p.dim() - 1)) for p in mine])
    parts = torch.split(delta_MP, [p.numel() // members for p in mine], 1)
    torch._foreach_add_(mine, [part.view(p.shape) for part, p in zip(parts, mine, strict=True)])


def apply_in_chunks(
    formula: Formula, bucket: Bucket, parameters: Mapping[str, nn.Parameter], mask_M: Tensor | None
) -> None:
    """The same, piece by piece."""
    members = len(bucket.step_M)
    flat = {
        key: (real(parameters[key].detach()).view(members, -1), _gradient(parameters[key], members))
        for key in bucket.keys
    }
    if mask_M is None and takes_gradients_as_they_are(bucket):
        for param_MP, grad_MP in flat.values():
            param_MP.addcmul_(*formula(bucket, grad_MP, param_MP))
        return
    if bucket.chunks is None:
        bucket.chunks = _chunks(bucket, parameters)
    for chunk in bucket.chunks:
        param_MP, grad_MP = (tensor[chunk.rows] for tensor in flat[chunk.key])
        mask = None if mask_M is None else mask_M[chunk.rows]
        shrink_M1 = shrinking(chunk.bucket)
        direction_MP, size_M1 = formula(chunk.bucket, grad_MP, param_MP)
        if mask is not None:
            # Both: before a member's first step Adam's correction divides by zero.
            direction_MP = torch.where(mask.unsqueeze(1), direction_MP, torch.zeros_like(direction_MP))
            size_M1 = torch.where(mask.unsqueeze(1), size_M1, torch.zeros_like(size_M1))
        if shrink_M1 is not None:
            param_MP.mul_(_masked_factor(shrink_M1, mask))
        param_MP.addcmul_(direction_MP, size_M1)


def _gradient(parameter: nn.Parameter, members: int) -> Tensor:
    assert parameter.grad is not None
    return real(parameter.grad).reshape(members, -1)


def _masked_factor(factor_M1: Tensor, mask_M: Tensor | None) -> Tensor:
    return factor_M1 if mask_M is None else torch.where(mask_M.unsqueeze(1), factor_M1, torch.ones_like(factor_M1))


def _flat(pieces: Sequence[Tensor]) -> Tensor:
    """Rows end to end, [M, P]."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 1)


def _chunks(bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> list[Chunk]:
    """Rows of each parameter, as many as fit; state and numbers are views of the bucket's."""
    members = len(bucket.step_M)
    chunks, start = [], 0
    for key in bucket.keys:
        columns = width(parameters[key])
        count = max(1, _CHUNK_BYTES // max(1, parameters[key].element_size() * parameters[key].numel() // members))
        for first in range(0, members, count):
            rows = slice(first, min(first + count, members))
            slots = {name: slot[rows, start : start + columns] for name, slot in bucket.slots.items()}
            numbers = {name: number[rows] for name, number in bucket.numbers.items()}
            piece = Bucket([key], bucket.group, numbers, bucket.flags, bucket.step_M[rows], slots)
            chunks.append(Chunk(key, rows, piece))
        start += columns
    return chunks
