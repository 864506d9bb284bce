"""The convolution kernel's rule without a GPU: what it takes, and who does the work where it cannot.

That its numbers are right is tested where the kernels can run (tests/kernels).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from burstpool.fusion.rules import convolution_at_once as rule
from burstpool.fusion.rules.base import Call, bind
from burstpool.fusion.rules.convolution_at_once import convolution_at_once, suits, transposed_at_once
from burstpool.fusion.rules.rounding import convolutions_may_round, products_may_round

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def kernels_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule.kernels, "present", lambda: True)


def call(layer: nn.Module, device: str = "cuda", *, own_input: bool = True) -> Call:
    """The layer's one operator, as if it had been captured on a device; each member has weights of its own."""
    program = torch.export.export(
        layer, (torch.zeros(2, layer.weight.shape[int(is_plain(layer))] * groups(layer), 9, 9),)
    )
    [node] = [node for node in program.graph.nodes if "conv" in str(node.target)]
    arguments = bind(node)
    for name in ("input", "weight"):
        arguments[name].meta["val"] = torch.empty_like(arguments[name].meta["val"], device="meta")
    found = Call(node, arguments, lambda given: own_input or given is not arguments["input"])
    found.tensor = lambda name: _Elsewhere(arguments[name].meta["val"], device)  # type: ignore[method-assign, assignment]
    return found


def is_plain(layer: nn.Module) -> bool:
    return not isinstance(layer, nn.ConvTranspose2d)


def groups(layer: Any) -> int:
    return int(layer.groups) if is_plain(layer) else 1


class _Elsewhere:
    """A tensor's shape on another device."""

    def __init__(self, tensor: torch.Tensor, device: str) -> None:
        self.shape, self.device = tensor.shape, torch.device(device)


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (nn.Conv2d(16, 32, 3, padding=1), True),
        (nn.Conv2d(16, 32, 3, stride=2, padding=(0, 2), bias=False), True),
        (nn.Conv2d(16, 32, 3, dilation=2), True),
        (nn.ConvTranspose2d(16, 32, 4, stride=2, padding=1), True),
        (nn.Conv2d(16, 32, 3, stride=2, dilation=2), False),
        (nn.Conv2d(16, 32, 3, stride=(1, 2), dilation=(2, 1)), True),
        (nn.Conv2d(16, 32, 3, groups=2), False),
        (nn.Conv2d(3, 32, 3), False),
        (nn.ConvTranspose2d(16, 3, 4), False),
        (nn.Conv2d(16, 32, 3, padding="same"), False),
    ],
)
def test_convolutions_that_the_kernel_takes(layer: nn.Module, taken: bool) -> None:
    assert suits(call(layer)) == taken


def test_shared_inputs_and_other_devices_are_left_to_others() -> None:
    layer = nn.Conv2d(16, 32, 3)
    assert suits(call(layer))
    assert not suits(call(layer, own_input=False))
    assert not suits(call(layer, "cpu"))


def test_without_kernels_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule.kernels, "present", lambda: False)
    assert not suits(call(nn.Conv2d(16, 32, 3)))


@pytest.mark.parametrize("make", [convolution_at_once, transposed_at_once])
def test_what_the_kernel_cannot_take_at_run_time_is_done_otherwise(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = make(lambda run, *arguments: "otherwise")
    x, weight = torch.zeros(2, 4, 16, 5, 5), torch.zeros(2, 16, 16, 3, 3)
    assert kernel(None, x, weight, None) == "otherwise"  # on the CPU
    monkeypatch.setattr(rule.kernels, "usable", lambda *tensors: True)
    monkeypatch.setattr(rule, "convolutions_may_round", lambda: False)
    assert kernel(None, x, weight, None) == "otherwise"  # 32 bits that may not be rounded


def test_what_may_be_rounded_is_known_by_either_of_torchs_settings() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.allow_tf32 = precision == "high"
            assert products_may_round() == convolutions_may_round() == (precision == "high")
            with torch.backends.cudnn.flags(enabled=False, allow_tf32=precision != "high"):
                assert convolutions_may_round() == (precision == "high"), "a product, then"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
