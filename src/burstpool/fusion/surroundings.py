"""What a loss function takes from its surroundings: the variables of its closure, and globals that its code names.

A step that was recorded or compiled runs the loss's code no more, so that it would go on with the targets of the first
batch where a lambda closes over them. Tensors and plain values are looked at; what lies inside of other objects, and
tensors whose contents change, are not.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

_PLAIN = bool | int | float | complex | str


class Surroundings:
    """The variables as they were when this was made."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._before = dict(_variables(function))

    def changed(self) -> str | None:
        """The name of a variable that is another one now."""
        now = dict(_variables(self._function))
        for name, before in self._before.items():
            if not _is_same(before, now.get(name)):
                return name
        return None


def _variables(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if isinstance(value, Tensor | _PLAIN):
            yield name, value
    known = getattr(function, "__globals__", {})
    for name in code.co_names:
        if isinstance(known.get(name), Tensor | _PLAIN):
            yield name, known[name]


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(before, _PLAIN) and type(before) is type(now) and bool(before == now))
