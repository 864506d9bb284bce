"""The file of a fused array that trains in the background, and the weights that are made of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from burstpool.errors import RunError
from burstpool.fusion.array import FusedArray
from burstpool.run.order import Position
from burstpool.share.array_file import export_members, load_array, save_array


class Odd(nn.Module):
    """Channels last, two names for one tensor, a buffer of its own, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(self.conv(x).mean((2, 3))))
        return found


class Described(Odd):
    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 2}


@pytest.mark.parametrize("kind", [Odd, Described])
def test_members_weights_are_what_their_modules_load(kind: type[Odd], tmp_path: Path) -> None:
    models = [kind() for _ in range(2)]
    array, path = FusedArray(models, torch.randn(2, 3, 5, 5)), tmp_path / "array.pt"
    positions = [Position(epoch=1, sample=4), Position(epoch=2, sample=0)]
    save_array(array, path, step=7, positions=positions)
    assert list(tmp_path.iterdir()) == [path]
    saved = load_array(path)
    assert (saved.step, saved.positions) == (7, positions)
    export_members(saved, tmp_path / "weights")
    for number, model in enumerate(models):
        weights = load_file(tmp_path / "weights" / f"member-{number:02}.safetensors")
        wanted = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[key], wanted[key]) for key in weights)
    again = FusedArray([kind() for _ in range(2)], torch.randn(2, 3, 5, 5))
    again.load_state_dict(saved.array)
    assert torch.equal(again.member(1).state_dict()["conv.weight"], models[1].conv.weight)


def test_a_file_that_is_cut_short_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "array.pt"
    save_array(FusedArray([Odd(), Odd()], torch.randn(2, 3, 5, 5)), path, step=1, positions=[Position()] * 2)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunError, match=r"cannot read .*array\.pt"):
        load_array(path)
