"""The form of a checkpoint: which parts it has, of which kind; what is cut short or foreign is refused in one line.

Takes an array and what is to be loaded into it. Returns nothing, or raises FusionError that names the part; nothing is
changed by then. Ignores what the numbers are, and what torch's own schedules keep.

Shapes: M = members, P = columns of all parameters of a bucket.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from burstpool.errors import FusionError
from burstpool.fusion.updates import width

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray

ARRAY, MEMBER = "array.state_dict()", "member(i).checkpoint()"
"""What makes checkpoints of a whole array, and of one member."""


@dataclass(frozen=True, slots=True)
class _Each:
    """A list, all entries of one form."""

    form: Any
    count: int | None = None
    """How many there must be; None for any number."""


_NUMBER = (int, float, Tensor)
_GROUPS = _Each({"params": list})
_TORCH_OPTIMIZER = {"state": Mapping, "param_groups": _GROUPS}
_BUCKET = {"keys": _Each(str), "group": int, "step": Tensor, "slots": Mapping}
_ARRAY_PARTS = {
    "members": _Each(Mapping),
    "streams": list,
    "active": Tensor,
    "frozen": Mapping,
    "optimizers": _Each(Mapping),
    "schedulers": _Each({"members": _Each(Mapping)}),
    "scalers": _Each({"scale": Tensor, "growth": Tensor}),
}
_MEMBER_PARTS = {
    "state": Mapping,
    "optimizers": _Each(_TORCH_OPTIMIZER),
    "schedulers": _Each(Mapping),
    "stream": Tensor,
}
_MEMBER_OPTIONAL = {"hidden": Mapping, "scalers": _Each({"scale": _NUMBER, "growth": _NUMBER}), "active": bool}
"""What those that are made of a job's own do not have."""


def check_array_parts(state: Mapping[str, Any]) -> None:
    """Refuses what lacks a part of `array.state_dict()`, or has another thing in its place."""
    _check(state, _ARRAY_PARTS, "", ARRAY)
    _check_kinds(state, ARRAY)


def check_array_contents(array: "FusedArray", state: Mapping[str, Any]) -> None:
    """Refuses parts that `array.state_dict()` of as many members cannot have made."""
    members = len(array)
    _check(state["streams"], _Each(Tensor, members), "['streams']", ARRAY)
    for index, stream in enumerate(state["streams"]):
        _check_stream(array, stream, f"['streams'][{index}]", ARRAY)
    _check_tensor(state["active"], (members,), "['active']", ARRAY)
    _check_frozen(array, state["frozen"])
    for place, scaler in enumerate(state["scalers"]):
        for name in ("scale", "growth"):
            _check_tensor(scaler[name], (members,), f"['scalers'][{place}]['{name}']", ARRAY)
    for place, optimizer in enumerate(state["optimizers"]):
        _check_optimizer(array, optimizer, f"['optimizers'][{place}]")


def check_member_form(array: "FusedArray", saved: Mapping[str, Any]) -> None:
    """Refuses what `member(i).checkpoint()` cannot have made."""
    present = {name: form for name, form in _MEMBER_OPTIONAL.items() if name in saved}
    _check(saved, {**_MEMBER_PARTS, **present}, "", MEMBER)
    _check_kinds(saved, MEMBER)
    _check_stream(array, saved["stream"], "['stream']", MEMBER)
    for key, value in saved.get("hidden", {}).items():
        _check_buffer(array, key, value, f"['hidden'][{key!r}]", MEMBER)
    for place, optimizer in enumerate(saved["optimizers"]):
        _check_places(optimizer, f"['optimizers'][{place}]", MEMBER)


def _check(value: Any, form: Any, where: str, made_by: str) -> None:
    """The value against a form: a type, several, a dict of parts that must be there, or entries of a list."""
    if isinstance(form, dict):
        _check_kind(value, Mapping, where, made_by)
        for name, part in form.items():
            if name not in value:
                raise _foreign(f"{_named(where)} has no {name!r}", made_by)
            _check(value[name], part, f"{where}[{name!r}]", made_by)
    elif isinstance(form, _Each):
        _check_kind(value, (list, tuple), where, made_by)
        if form.count is not None and len(value) != form.count:
            raise _foreign(f"{_named(where)} has {len(value)} entries, not {form.count}", made_by)
        for place, entry in enumerate(value):
            _check(entry, form.form, f"{where}[{place}]", made_by)
    else:
        _check_kind(value, form, where, made_by)


def _check_kind(value: Any, kinds: Any, where: str, made_by: str) -> None:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise _foreign(f"{_named(where)} is a {type(value).__name__}, not a {names}", made_by)


def _check_tensor(value: Tensor, shape: Sequence[int], where: str, made_by: str) -> None:
    _check_kind(value, Tensor, where, made_by)
    if value.shape != torch.Size(shape):
        raise _foreign(f"{_named(where)} has shape {list(value.shape)}, not {list(shape)}", made_by)


def _check_kinds(state: Mapping[str, Any], made_by: str) -> None:
    """Names of classes, where the checkpoint has them: one for each optimizer and each schedule."""
    _check_kind(state.get("kinds", {}), Mapping, "['kinds']", made_by)
    for part in ("optimizers", "schedulers"):
        if part in state.get("kinds", {}):
            _check(state["kinds"][part], _Each(str, len(state[part])), f"['kinds'][{part!r}]", made_by)


def _check_stream(array: "FusedArray", stream: Any, where: str, made_by: str) -> None:
    try:
        torch.Generator(array.device).set_state(stream)
    except (RuntimeError, TypeError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise _foreign(f"{_named(where)} is no random stream of a {array.device.type} ({why})", made_by) from None


def _check_frozen(array: "FusedArray", frozen: Mapping[Any, Any]) -> None:
    for index, saved in frozen.items():
        where = f"['frozen'][{index!r}]"
        if not isinstance(index, int) or not 0 <= index < len(array):
            raise _foreign(f"{_named(where)} is of no member from 0 to {len(array) - 1}", ARRAY)
        _check_kind(saved, Mapping, where, ARRAY)
        for key, value in saved.items():
            _check_buffer(array, key, value, f"{where}[{key!r}]", ARRAY)


def _check_buffer(array: "FusedArray", key: Any, value: Any, where: str, made_by: str) -> None:
    if key not in array.state.buffers:
        raise _foreign(f"{_named(where)} is of a buffer that the members do not have", made_by)
    _check_tensor(value, array.state.buffers[key].shape[1:], where, made_by)


def _check_optimizer(array: "FusedArray", saved: Mapping[str, Any], where: str) -> None:
    """Either of all members at once, in buckets, or of torch's optimizers one by one."""
    if "members" in saved:
        _check(saved, {"members": _Each(_TORCH_OPTIMIZER)}, where, ARRAY)
        for index, member in enumerate(saved["members"]):
            _check_places(member, f"{where}['members'][{index}]", ARRAY)
        return
    _check(saved, {"buckets": _Each(_BUCKET), "numbers": _Each(_Each(Mapping))}, where, ARRAY)
    parameters = array.state.parameters
    for place, bucket in enumerate(saved["buckets"]):
        here = f"{where}['buckets'][{place}]"
        if unknown := [key for key in bucket["keys"] if key not in parameters]:
            raise _foreign(f"{_named(here)} is of {unknown[0]!r}, which the members do not have", ARRAY)
        _check_tensor(bucket["step"], (len(array),), f"{here}['step']", ARRAY)
        columns = sum(width(parameters[key]) for key in bucket["keys"])
        for name, slot in bucket["slots"].items():
            _check_tensor(slot, (len(array), columns), f"{here}['slots'][{name!r}]", ARRAY)


def _check_places(saved: Mapping[str, Any], where: str, made_by: str) -> None:
    """State is kept by the places that parameters have in the groups."""
    places = {place for group in saved["param_groups"] for place in group["params"]}
    for place, slots in saved["state"].items():
        if place not in places:
            raise _foreign(f"{_named(where)} has state of parameter {place!r}, which none of its groups has", made_by)
        _check_kind(slots, Mapping, f"{where}['state'][{place!r}]", made_by)


def _named(where: str) -> str:
    return f"its {where}" if where else "it"


def _foreign(problem: str, made_by: str) -> FusionError:
    return FusionError(
        f"the checkpoint is not one that {made_by} made, or not all of it: {problem}; load what {made_by} of the same "
        "models gave, unchanged"
    )
