"""Checkpoints of a whole array: members under the user's keys, and all it takes to go on as if never stopped."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from burstpool.errors import FusionError
from burstpool.fusion.checkpoint_form import ARRAY, MEMBER, check_array_contents, check_array_parts, check_member_form
from burstpool.fusion.copied import copied

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray

SCHEMA_VERSION = 1
_PARTS = ("optimizers", "schedulers", "scalers")


def state_dict(array: "FusedArray") -> dict[str, Any]:
    """All of it copies; the dict goes through torch.save and torch.load(weights_only=True)."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kinds": _kinds(array),
        "members": [array.state.member(index, persistent=False) for index in range(len(array))],
        "streams": array.streams.states(),
        "active": array.active.clone(),
        "frozen": copied(array._frozen),
        **{part: [item.state_dict() for item in getattr(array, part)] for part in _PARTS},
    }


def load_state_dict(array: "FusedArray", state: Mapping[str, Any]) -> None:
    """Everything as it was, bit for bit; nothing of the dict is kept."""
    _check(array, state)
    tensors = array.state.tensors
    with torch.no_grad():
        for index, member in enumerate(state["members"]):
            for key, value in member.items():
                tensors[array.state.aliases[key]][index].copy_(value)
        array.active.copy_(state["active"])
    for index in range(len(array)):
        array._thaw(index)
    array.streams.restore(state["streams"])
    for index, saved in state["frozen"].items():
        array._freeze(int(index), copied(dict(saved)))
    for optimizer, saved in zip(array.optimizers, state["optimizers"], strict=True):
        with _in_one_line("an optimizer"):
            optimizer.load_state_dict(saved)
    for scheduler, saved in zip(array.schedulers, state["schedulers"], strict=True):
        with _in_one_line("a schedule"):
            scheduler.load_state_dict(saved)
    for scaler, saved in zip(array.scalers, state["scalers"], strict=True):
        scaler.load_state_dict(saved)
    for optimizer in array.optimizers:
        optimizer.keeps_state |= bool(array._frozen)
        optimizer.pull()


def member_state(array: "FusedArray", index: int) -> dict[str, Any]:
    """One member's share of the array; tensors are copies."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kinds": _kinds(array),
        "state": array.state.member(index),
        "hidden": _hidden(array, index),
        "optimizers": [optimizer.member_state_dict(index) for optimizer in array.optimizers],
        "schedulers": [scheduler.member_state_dict(index) for scheduler in array.schedulers],
        "scalers": [scaler.member_state_dict(index) for scaler in array.scalers],
        "stream": array.streams.state(index),
        "active": bool(array.active[index]),
    }


def load_member_state(array: "FusedArray", index: int, saved: Mapping[str, Any]) -> None:
    """One member as it was, in this array or another of the same models, optimizers and schedules."""
    _check_schema(saved, "state", MEMBER)
    check_member_form(array, saved)
    for part in _PARTS:
        found, wanted = len(saved.get(part, ())), len(getattr(array, part))
        if found != wanted:
            raise FusionError(f"the member was saved with {found} {part}, the array has {wanted}")
    _check_kinds(array, saved)
    array.state.check(index, saved["state"])
    # First, as they may refuse what is no number of their options: nothing else is changed then.
    for optimizer, state in zip(array.optimizers, saved["optimizers"], strict=True):
        with _in_one_line("an optimizer"):
            optimizer.load_member_state_dict(index, state)
    array.start(index)
    array.state.load(index, saved["state"])
    with torch.no_grad():
        for key, value in saved.get("hidden", {}).items():
            array.state.buffers[key][index].copy_(value)
    array.streams.generators[index].set_state(saved["stream"])
    for scheduler, state in zip(array.schedulers, saved["schedulers"], strict=True):
        with _in_one_line("a schedule"):
            scheduler.load_member_state_dict(index, state)
    for scaler, state in zip(array.scalers, saved.get("scalers", ()), strict=True):
        scaler.load_member_state_dict(index, state)
    if not saved.get("active", True):
        array.stop(index)


def _hidden(array: "FusedArray", index: int) -> dict[str, torch.Tensor]:
    """Buffers that are no part of a state dict."""
    shown = {
        array.state.aliases[key] for key in array.state.skeletons[index].state_dict() if key in array.state.aliases
    }
    return {key: buffer[index].clone() for key, buffer in array.state.buffers.items() if key not in shown}


def _kinds(array: "FusedArray") -> dict[str, list[str]]:
    """What optimizers and schedules there are, by their classes' names."""
    return {
        "optimizers": [type(optimizer.proxies[0]).__name__ for optimizer in array.optimizers],
        "schedulers": [type(scheduler.schedulers[0]).__name__ for scheduler in array.schedulers],
    }


def _check_kinds(array: "FusedArray", state: Mapping[str, Any]) -> None:
    for part, mine in _kinds(array).items():
        # Checkpoints of earlier versions, and those that are made of a job's own, do not say.
        for saved, here in zip(state.get("kinds", {}).get(part, mine), mine, strict=True):
            if saved != here:
                raise FusionError(f"the checkpoint is of {saved}, the array has {here}; make the same before loading")


@contextlib.contextmanager
def _in_one_line(who: str) -> Iterator[None]:
    """What these keep is torch's own, or the user's, and so is what they raise at a state that they do not know."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise FusionError(
            f"{who} refuses its state in the checkpoint ({type(error).__name__}: {' '.join(str(error).split())}); make "
            "the same optimizers and schedules as those that were saved before loading"
        ) from error


def _check_schema(state: Mapping[str, Any], part: str, made_by: str) -> None:
    if not isinstance(state, Mapping):
        raise FusionError(f"a checkpoint is a dict that {made_by} made, not a {type(state).__name__}")
    if state.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise FusionError(f"the checkpoint has schema {state['schema_version']}; this version reads {SCHEMA_VERSION}")
    if part not in state or "schema_version" not in state:
        raise FusionError(f"the checkpoint is not one that {made_by} made: it has no {part!r} and schema version")


def _check(array: "FusedArray", state: Mapping[str, Any]) -> None:
    _check_schema(state, "members", ARRAY)
    check_array_parts(state)
    if len(state["members"]) != len(array):
        raise FusionError(
            f"the checkpoint has {len(state['members'])} members, the array {len(array)}; make one of the same size"
        )
    known = array.state.aliases.keys()
    for index, member in enumerate(state["members"]):
        if different := member.keys() ^ known:
            raise FusionError(f"the checkpoint's member {index} and the array differ in {sorted(different)[0]!r}")
        array.state.check_shapes(index, member)
    for part in _PARTS:
        if len(state[part]) != len(getattr(array, part)):
            raise FusionError(
                f"the checkpoint has {len(state[part])} {part}, the array {len(getattr(array, part))}; "
                "make them before loading, in the same order"
            )
    _check_kinds(array, state)
    check_array_contents(array, state)
