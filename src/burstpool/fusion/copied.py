"""Copies of state: what goes into a checkpoint, or comes out of one, shares no memory with what is trained."""

import copy
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


def copied(tree: T) -> T:
    """Dicts, lists and tuples of tensors and other values, each a copy; what was one object stays one.

    Not `copy.deepcopy`: of a view it would copy all the memory that the view is a part of.
    """
    made: dict[int, Any] = {}

    def one(leaf: Any) -> Any:
        if id(leaf) not in made:
            made[id(leaf)] = leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
        return made[id(leaf)]

    result: T = pytree.tree_map(one, tree)
    return result
