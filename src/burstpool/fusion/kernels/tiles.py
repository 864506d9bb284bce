"""How large a part of a product one program of a kernel makes: all of a GPU is to have work, factors to be read seldom.

By what was measured on an H200 for nine shapes of convolutions (docs/LOG.md). Depends on the shapes, the type of the
numbers, the number of copies and the whole GPU, not on the part of it that a stream is confined to: a step has the same
bits on each.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

OPTIONS = {"num_warps": 4, "num_stages": 3}
"""Of kernels with these tiles; eight warps or four stages were slower for most."""
_LEAST, _MOST = 16, 128
"""Sides of the smallest product that the matrix units take, and of the largest that is worth while."""
_TALL, _WIDE = 64, 32
"""Sides below which tiles do not go for want of programs."""
_BUSY = 0.75
"""Programs a multiprocessor below which tiles are made smaller."""
_LEAST_TURNS = 8
"""Turns of the loop over a sum below which it is not cut into parts."""


class Tile(NamedTuple):
    """As kernels take it."""

    rows: int
    columns: int
    depth: int
    """How much of the sum is taken at a time."""


def tile_of(rows: int, *, columns: int, depth: int, copies: int, like: Tensor) -> Tile:
    """The largest of which there are enough for `copies` products; of small ones more of the sum is taken at a time."""
    tall, wide = _side(rows), _side(columns)
    enough = _BUSY * _multiprocessors(like.device)
    while triton.cdiv(rows, tall) * triton.cdiv(columns, wide) * copies < enough:
        if tall > _TALL and tall >= wide:
            tall //= 2
        elif wide > _WIDE:
            wide //= 2
        else:
            break
    deep = _depth(like) * (1 if max(tall, wide) > _TALL else 2)
    return Tile(tall, wide, min(max(triton.next_power_of_2(depth), _LEAST), deep))


def square_tile(rows: int, columns: int, *, depth: int, like: Tensor) -> Tile:
    """For products of which there are many, or whose sums are cut into parts: as square as their sides allow."""
    tall, wide = _side(rows), _side(columns)
    return Tile(min(tall, max(wide, _TALL)), min(wide, max(tall, _TALL)), min(_side(depth), _depth(like)))


def parts_of(rows: int, *, programs: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Into how many parts a sum over rows is cut, so that there is work for all, and the rows of each."""
    wanted = triton.cdiv(2 * _multiprocessors(device), programs)
    parts = max(min(wanted, rows // (_LEAST_TURNS * tile.depth)), 1)
    part_rows = triton.cdiv(triton.cdiv(max(rows, 1), parts), tile.depth) * tile.depth
    return triton.cdiv(max(rows, 1), part_rows), part_rows


def _side(size: int) -> int:
    return min(max(int(triton.next_power_of_2(size)), _LEAST), _MOST)


def _depth(like: Tensor) -> int:
    return 128 // int(like.dtype.itemsize)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
