"""Pieces against a dense tensor: whatever is put, added and taken, in whatever ranges."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from burstpool.run.reshard import Pieces

BATCH = 12
RANGES = st.tuples(st.integers(0, BATCH - 1), st.integers(1, BATCH)).map(lambda r: (r[0], min(BATCH, r[0] + r[1])))
OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "add", "pop"]), RANGES), max_size=8)


@given(operations=OPERATIONS, wanted=RANGES, dim=st.integers(0, 1))
def test_pieces_hold_what_a_dense_tensor_would(
    operations: list[tuple[str, tuple[int, int]]], wanted: tuple[int, int], dim: int
) -> None:
    pieces, dense, held = Pieces(dim), torch.zeros(BATCH, 3), torch.zeros(BATCH, dtype=torch.bool)
    for number, (operation, (start, stop)) in enumerate(operations):
        tensor = torch.full((stop - start, 3), float(number + 1)) + torch.arange(start, stop)[:, None]
        rows = slice(start, stop)
        if operation == "pop":
            pieces.pop(start, stop)
            dense[rows], held[rows] = 0, False
        elif operation == "put":
            pieces.put(start, stop, tensor if dim == 0 else tensor.T)
            dense[rows], held[rows] = tensor, True
        else:
            pieces.add(start, stop, tensor if dim == 0 else tensor.T)
            dense[rows] += tensor
            held[rows] = True
    rows = slice(*wanted)
    assert pieces.holds_any(*wanted) == bool(held[rows].any())
    found = pieces.take(*wanted)
    if not held[rows].all():
        assert found is None
    else:
        assert found is not None
        assert torch.equal(found if dim == 0 else found.T, dense[rows])


def test_a_value_without_samples_is_held_whole() -> None:
    pieces = Pieces(None)
    assert pieces.take(0, 4) is None
    pieces.add(0, 4, torch.ones(3))
    pieces.add(4, 8, torch.ones(3))
    found = pieces.pop(2, 3)
    assert found is not None
    assert found.tolist() == [2, 2, 2]
    assert pieces.take(0, 4) is None


def test_one_piece_that_is_wanted_whole_is_not_copied() -> None:
    pieces, tensor = Pieces(0), torch.ones(4, 2)
    pieces.put(4, 8, tensor)
    assert pieces.take(4, 8) is tensor
