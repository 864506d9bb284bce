"""What a fused array that trains in the background leaves: one file to go on from, and its members' weights.

The file is written whole or not at all, on the host, from whatever device the array is on. Members' weights come from
it, so that they are of the step that it is of, and nobody needs the user's code for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from burstpool.errors import RunError, in_a_line
from burstpool.run.export import write_weights
from burstpool.run.order import Position

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedArray:
    """What the file says."""

    array: dict[str, Any]
    """For `FusedArray.load_state_dict`."""
    step: int
    """Steps that are done."""
    positions: list[Position]
    """Where each member's next samples begin."""
    weights: list[dict[str, Any]]
    """Each member's state dict, under the user's own keys."""


def save_array(array: "FusedArray", path: Path, *, step: int, positions: Sequence[Position]) -> None:
    """Tensors that are in both parts of it are written once."""
    saved = array.state_dict()
    whole = {
        "array": saved,
        "step": step,
        "positions": [(position.epoch, position.sample) for position in positions],
        "weights": [_shown(array, index, saved["members"][index]) for index in range(len(array))],
    }
    aside = path.with_name(f".{path.name}.part")
    try:
        torch.save(whole, aside)
        aside.replace(path)
    except BaseException:  # of a full disk it would take what is left
        aside.unlink(missing_ok=True)
        raise


def load_array(path: Path) -> SavedArray:
    """What `save_array` wrote."""
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        positions = [Position(epoch=epoch, sample=sample) for epoch, sample in saved["positions"]]
        return SavedArray(array=saved["array"], step=saved["step"], positions=positions, weights=saved["weights"])
    except Exception as error:  # torch raises anything for a file that is cut short
        raise RunError(f"cannot read {path} ({in_a_line(error)})") from error


def export_members(saved: SavedArray, folder: Path) -> None:
    """`member-00.safetensors` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = max(len(str(len(saved.weights) - 1)), 2)
    for index, weights in enumerate(saved.weights):
        write_weights(weights, folder / f"member-{index:0{digits}}.safetensors")


def _shown(array: "FusedArray", index: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A member's state dict, of the tensors that are saved anyway where it is made of these."""
    keys = array.state.skeletons[index].state_dict().keys()
    if keys <= tensors.keys():
        return {key: tensors[key] for key in keys}
    state = array.state.member(index)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
