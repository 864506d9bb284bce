"""Weights as safetensors, whatever a state dict's tensors are like; whole runs' are in `test_train.py`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from burstpool.errors import RunError
from burstpool.run.export import write_weights


def test_tensors_go_to_the_file_however_they_lie_and_nothing_else_does(tmp_path: Path) -> None:
    kernel = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    tied = torch.nn.Parameter(torch.randn(5, 2))
    state = {"conv": kernel, "in": tied, "out": tied.T, "part": torch.arange(6)[::2], "_extra_state": {"calls": 3}}
    found = load_file(write_weights(state, tmp_path / "weights.safetensors"))
    assert found.keys() == state.keys() - {"_extra_state"}
    for key, tensor in found.items():
        assert torch.equal(tensor, torch.as_tensor(state[key]))
    assert not list(tmp_path.glob(".*"))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot write"):
        write_weights({"a": torch.zeros(2)}, tmp_path / "none" / "weights.safetensors")
