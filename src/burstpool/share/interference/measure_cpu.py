"""Measures the interference table of this machine's CPU: two processes, one a foreground's layer, one a background's.

Each runs forward and backward of a small layer of its kind over and over on one thread, the background at the lowest
priority, alone and in every pair, for a fraction of a second; rates are counted while both run. A kind's alone rate is
taken before and after its pairs, so that a machine that changes meanwhile is noticed as noise rather than as
interference. Communication is bytes through a pipe, as between workers of one machine.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch.nn import functional as F

from burstpool.errors import ShareError
from burstpool.share.background_process import take_lowest_priority
from burstpool.share.interference.table import COMMUNICATION, KINDS, InterferenceTable, Pair

_LEAD_S = 0.02
"""Between being told and starting, so that both have been told."""
_TRIES = 6


def measure_on_cpu(
    *,
    kinds: Sequence[str] = KINDS,
    window_s: float = 0.25,
    progress: Callable[[int, int, str], None] | None = None,
) -> InterferenceTable:
    """All pairs of these kinds; takes about as many windows as there are pairs."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for lowest in (False, True):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(theirs, lowest), daemon=True)
        process.start()
        theirs.close()  # its own end is then the only one: its death shows as the end of the pipe
        ends.append(ours)
        processes.append(process)
    try:
        pairs = _measure(ends, kinds, window_s, progress or (lambda done, total, what: None))
    finally:
        for process in processes:
            process.terminate()
            process.join()
    source = f"burstpool, torch {torch.__version__}, {window_s:g} s a pair, one thread a process"
    return InterferenceTable(device="CPU", source=source, pairs=tuple(pairs))


def _measure(
    ends: Sequence[Connection], kinds: Sequence[str], window_s: float, progress: Callable[[int, int, str], None]
) -> list[Pair]:
    foreground, background = ends
    beside = [kind for kind in kinds if kind != COMMUNICATION]
    alone_beside = {kind: _rates([(background, kind)], window_s)[0] for kind in beside}
    pairs = []
    for kind in kinds:
        before = _rates([(foreground, kind)], window_s)[0]
        counted = [_rates([(foreground, kind), (background, other)], window_s) for other in beside]
        after = _rates([(foreground, kind)], window_s)[0]
        for other, (rate, other_rate) in zip(beside, counted, strict=True):
            pairs.append(
                Pair(
                    foreground=kind,
                    background=other,
                    slowdown=(before + after) / 2 / rate,
                    kept=other_rate / alone_beside[other],
                )
            )
        progress(len(pairs), len(kinds) * len(beside), kind)
    return pairs


def _rates(told: Sequence[tuple[Connection, str]], window_s: float) -> list[float]:
    """Times a second, of all that are told; a window in which the first did not run once is tried again, longer."""
    kinds = " beside ".join(kind for _, kind in told)
    try:
        for _ in range(_TRIES):
            for end, kind in told:
                end.send(kind)
            for end, _ in told:
                end.recv()  # it is there, and has made its layer
            start_s = time.time() + _LEAD_S
            for end, _ in told:
                end.send((start_s, window_s))
            counts = [end.recv() for end, _ in told]
            if counts[0]:
                return [count / window_s for count in counts]
            window_s *= 2
    except (EOFError, OSError):
        raise ShareError(f"a process that measured {kinds} has died; is there enough memory?") from None
    raise ShareError(f"{kinds}: it did not run once in {window_s:g} s; the machine is too busy to measure on")


def _run(end: Connection, lowest: bool) -> None:
    """What each of the two processes runs."""
    torch.set_num_threads(1)
    if lowest:
        take_lowest_priority()
    layers: dict[str, Callable[[], object]] = {}
    while True:
        kind = end.recv()
        if kind not in layers:
            layers[kind] = LAYERS[kind]()
        layers[kind]()
        end.send("ready")
        end.send(count_in_window(layers[kind], *end.recv()))


def count_in_window(layer: Callable[[], object], start_s: float, window_s: float) -> int:
    """How often it ran in a window of the machine's clock: the same for both processes, whoever was told first."""
    while time.time() < start_s:
        layer()
    count = 0
    while time.time() < start_s + window_s:
        layer()
        count += 1
    return count


def trained(model: nn.Module, *inputs: torch.Tensor) -> Callable[[], object]:
    """A function that runs forward and backward of a layer."""

    def step() -> None:
        output = model(*inputs)
        (output[0] if isinstance(output, tuple) else output).sum().backward()

    return step


class Attention(nn.Module):
    """Attention of a sequence to itself, with something to train."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, heads, tokens, width]."""
        return F.scaled_dot_product_attention(x * self.scale, x, x)


def _pointwise() -> Callable[[], object]:
    return trained(nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1)), torch.randn(16, 32, 16, 16))


def _optimizer() -> Callable[[], object]:
    parameter = nn.Parameter(torch.randn(512, 512))
    parameter.grad = torch.randn(512, 512)
    return torch.optim.SGD([parameter], lr=1e-6, momentum=0.9).step


def _communication() -> Callable[[], object]:
    out, into = os.pipe()
    block = b"x" * (32 << 10)

    def step() -> None:
        for _ in range(16):
            os.write(into, block)
            os.read(out, len(block))

    return step


LAYERS: dict[str, Callable[[], Callable[[], object]]] = {
    "convolution": lambda: trained(nn.Conv2d(16, 32, 3, padding=1), torch.randn(8, 16, 16, 16)),
    "linear": lambda: trained(nn.Linear(256, 256), torch.randn(64, 256)),
    "attention": lambda: trained(Attention(32), torch.randn(4, 4, 64, 32)),
    "recurrent": lambda: trained(nn.LSTM(64, 64), torch.randn(16, 8, 64)),
    "pointwise": _pointwise,
    "optimizer": _optimizer,
    COMMUNICATION: _communication,
}
"""Kind → makes a function that runs such a layer once."""
