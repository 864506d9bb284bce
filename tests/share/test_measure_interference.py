"""Measuring the interference of two processes on a CPU: the window both count in, and processes that die."""

import contextlib
import multiprocessing
import threading

import pytest
import torch
from share_stand_ins import Clock

from burstpool.errors import ShareError
from burstpool.share.interference.measure_cpu import LAYERS, _rates, _run, count_in_window, measure_on_cpu

pytestmark = pytest.mark.alone


def test_both_processes_count_within_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("burstpool.share.interference.measure_cpu.time", clock)

    def layer() -> None:
        clock.pass_by(0.25)

    assert count_in_window(layer, clock.now_s + 1, 4) == 16  # it runs before, too, but that does not count
    assert clock.now_s == 1e9 + 5
    assert count_in_window(layer, clock.now_s - 2, 4) == 8  # told when half of it was over
    assert count_in_window(layer, clock.now_s - 5, 4) == 0


def test_a_measuring_process_that_dies_is_told_and_layers_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setitem(LAYERS, "linear", lambda: made.append("linear") or (lambda: None))
    ours, theirs = multiprocessing.Pipe()
    threads = torch.get_num_threads()

    def measuring() -> None:
        with contextlib.suppress(EOFError):
            _run(theirs, False)

    thread = threading.Thread(target=measuring, daemon=True)
    thread.start()
    for _ in range(3):
        assert _rates([(ours, "linear")], 0.01)[0] > 0
    assert made == ["linear"]
    ours.close()
    thread.join(60)
    torch.set_num_threads(threads)
    with pytest.raises(ShareError, match="has died"):
        measure_on_cpu(kinds=["no such layer"], window_s=0.01)
