"""What is said of a GPU, by a driver that is a stand-in."""

from typing import Any

import pytest

from burstpool.errors import CaptureError
from burstpool.model import cuda_driver
from burstpool.share.gpu.capabilities import Capabilities, capabilities
from burstpool.share.gpu.partition import MADE_WITH


class Driver:
    """Knows its functions by name; those that return a number other than 0 refuse."""

    def __init__(self, *, mps: int = 0, refuses: str = "", lacks: str = "") -> None:
        def answer(name: str) -> Any:
            def function(*arguments: Any) -> int:
                if name == "cuDeviceGetAttribute":
                    result, attribute, device = arguments
                    assert (attribute.value, device.value) == (133, 3)
                    result._obj.value = mps
                if name == "cuDeviceGet":
                    result, index = arguments
                    result._obj.value = index.value + 1
                return 999 if name == refuses else 0

            return function

        for name in ("cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetDevResource", *MADE_WITH):
            if name != lacks:
                setattr(self, name, answer(name))


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        (Driver(mps=1), Capabilities(no_parts="", side_by_side=True)),
        (Driver(), Capabilities(no_parts="", side_by_side=False)),
        (Driver(refuses="cuDeviceGetAttribute", mps=1), Capabilities(no_parts="", side_by_side=False)),
        (
            Driver(lacks="cuGreenCtxCreate"),
            Capabilities(no_parts="the CUDA driver is too old: it has no cuGreenCtxCreate", side_by_side=False),
        ),
        (
            Driver(refuses="cuDeviceGetDevResource"),
            Capabilities(
                no_parts="cuDeviceGetDevResource of the CUDA driver failed with status 999", side_by_side=False
            ),
        ),
    ],
)
def test_what_a_gpu_offers_is_what_its_driver_says(
    driver: Driver, found: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    assert capabilities(2) == found


def test_without_a_driver_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise CaptureError("the CUDA driver cannot be called: no such file")

    monkeypatch.setattr(cuda_driver, "_driver", missing)
    found = capabilities(0)
    assert "cannot be called" in found.no_parts
    assert not found.side_by_side
