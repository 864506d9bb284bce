"""Measures the interference table of a GPU: a foreground's layer on a stream of high priority, a background's on a low.

Each kind is one layer of a usual size, forward and backward, captured as a CUDA graph of about a millisecond and
replayed over and over, alone and in every pair. What is counted is what ends on the device within the same window.
Communication is a copy between the device and pinned memory of the host: one GPU has no other link.
"""

import collections
from collections.abc import Callable, Sequence

import torch
from torch import nn

from burstpool.share.gpu.loop import streams
from burstpool.share.interference.measure_cpu import Attention, trained
from burstpool.share.interference.table import COMMUNICATION, KINDS, InterferenceTable, Pair

_GRAPH_S = 1e-3
"""About how long a graph is made."""
_AHEAD = 4
"""Graphs that are queued on each stream, so that neither runs dry."""


def measure_on_cuda(
    *,
    kinds: Sequence[str] = KINDS,
    window_s: float = 0.06,
    progress: Callable[[int, int, str], None] | None = None,
) -> InterferenceTable:
    """All pairs of these kinds, on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    high, low = streams(device)
    beside = [kind for kind in kinds if kind != COMMUNICATION]
    foregrounds = {kind: _Loop(LAYERS[kind](), high) for kind in kinds}
    backgrounds = {kind: _Loop(LAYERS[kind](), low) for kind in beside}
    alone = {kind: _rates([loop], window_s)[0] for kind, loop in backgrounds.items()}
    pairs: list[Pair] = []
    for kind, foreground in foregrounds.items():
        before = _rates([foreground], window_s)[0]
        counted = [_rates([foreground, background], window_s) for background in backgrounds.values()]
        after = _rates([foreground], window_s)[0]
        for other, (rate, other_rate) in zip(beside, counted, strict=True):
            slowdown = (before + after) / 2 / rate
            pairs.append(Pair(foreground=kind, background=other, slowdown=slowdown, kept=other_rate / alone[other]))
        if progress is not None:
            progress(len(pairs), len(kinds) * len(beside), kind)
    source = f"burstpool, torch {torch.__version__}, {window_s:g} s a pair, two streams of one process"
    return InterferenceTable(device=torch.cuda.get_device_name(device), source=source, pairs=tuple(pairs))


class _Loop:
    """A layer that is replayed on a stream."""

    def __init__(self, layer: Callable[[], object], stream: torch.cuda.Stream) -> None:
        self.stream = stream
        with torch.cuda.stream(stream):
            for _ in range(3):
                layer()
            torch.cuda.synchronize()
            repeats = max(round(_GRAPH_S / self._time_of(layer)), 1)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(repeats):
                    layer()
            self.kept = layer  # a graph's tensors must stay alive
        torch.cuda.synchronize()

    def _time_of(self, layer: Callable[[], object]) -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for _ in range(10):
            layer()
        marks[1].record()
        torch.cuda.synchronize()
        return float(marks[0].elapsed_time(marks[1])) / 1e4

    def launch(self) -> torch.cuda.Event:
        """One more; returns what marks its end."""
        with torch.cuda.stream(self.stream):
            self.graph.replay()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event


def _rates(loops: Sequence[_Loop], window_s: float) -> list[float]:
    """Replays a second of each loop while all of them run."""
    queues: list[collections.deque[torch.cuda.Event]] = [collections.deque() for _ in loops]
    ended: list[list[torch.cuda.Event]] = [[] for _ in loops]
    torch.cuda.synchronize()
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record(loops[0].stream)
    while not ended[0] or start.elapsed_time(ended[0][-1]) / 1e3 < window_s:
        for loop, queue, done in zip(loops, queues, ended, strict=True):
            while queue and queue[0].query():  # type: ignore[no-untyped-call]
                done.append(queue.popleft())
            while len(queue) < _AHEAD:
                queue.append(loop.launch())
    torch.cuda.synchronize()
    return [_rate(start, [*done, *queue], window_s) for done, queue in zip(ended, queues, strict=True)]


def _rate(start: torch.cuda.Event, events: Sequence[torch.cuda.Event], window_s: float) -> float:
    """From the first to the last that ended within the window; the first tenth is left out."""
    times_s = [float(start.elapsed_time(event)) / 1e3 for event in events]
    inside = [time_s for time_s in times_s if 0.1 * window_s <= time_s <= window_s]
    if len(inside) < 2:  # longer than the window by itself
        return len(times_s) / times_s[-1]
    return (len(inside) - 1) / (inside[-1] - inside[0])


def _on_gpu(model: nn.Module, *shape: int) -> Callable[[], object]:
    return trained(model.to("cuda", torch.bfloat16), torch.randn(*shape, device="cuda", dtype=torch.bfloat16))


def _optimizer() -> Callable[[], object]:
    parameters = [nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(24)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.SGD(parameters, lr=1e-6, momentum=0.9).step


def _communication() -> Callable[[], object]:
    here, there = torch.empty(8 << 20, device="cuda"), torch.empty(8 << 20, pin_memory=True)
    return lambda: there.copy_(here, non_blocking=True)


LAYERS: dict[str, Callable[[], Callable[[], object]]] = {
    "convolution": lambda: _on_gpu(nn.Conv2d(256, 256, 3, padding=1), 8, 256, 28, 28),
    "linear": lambda: _on_gpu(nn.Linear(4096, 4096), 64, 4096),
    "attention": lambda: _on_gpu(Attention(64), 8, 12, 512, 64),
    "recurrent": lambda: _on_gpu(nn.LSTM(1024, 1024), 16, 32, 1024),
    "pointwise": lambda: _on_gpu(nn.Sequential(nn.BatchNorm2d(256), nn.ReLU()), 8, 256, 56, 56),
    "optimizer": _optimizer,
    COMMUNICATION: _communication,
}
"""Kind → makes a function that runs such a layer once on the current stream."""
