"""Timing: how long a layer's forward and backward take when it runs alone.

Takes a `Work` (one forward, and what its backward computes). Returns medians and spreads. On the CPU each pass is
timed by the wall clock; on CUDA passes are captured in graphs, many repeats to a graph, so that neither the
interpreter nor a graph's launch is part of the result. The start of the autograd engine, which real training pays
once a step and not once a layer, is measured on tiny layers and taken off.
"""

import contextlib
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

TARGET_S = 0.15
"""Time to spend on the repeats of one pass."""
MIN_REPEATS, MAX_REPEATS = 3, 60
_CHAIN = 8
"""Layers of the chain on which the start of autograd's engine is measured."""
_GRAPH_S = 1e-3
"""Work in one CUDA graph; its launch, about 10 µs, is then below 1%."""
_MAX_COPIES = 100
"""Repeats in one CUDA graph at most, to bound the time to capture it."""
_MIN_REPLAYS = 5
_REPLAYS_S = 0.015
"""Time to spend on replaying one graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of repeated passes."""

    forward_s: float
    backward_s: float
    forward_spread_s: float
    """Interquartile range."""
    backward_spread_s: float

    @classmethod
    def of(cls, forward: Sequence[float], backward: Sequence[float]) -> "Measured":
        """Medians and spreads of these times."""
        return cls(
            forward_s=statistics.median(forward),
            backward_s=statistics.median(backward),
            forward_spread_s=_spread(forward),
            backward_spread_s=_spread(backward),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A pass forward, and how to go back."""

    forward: Callable[[], Sequence[torch.Tensor]]
    """Runs forward under autograd; returns the differentiable results."""
    inputs: Sequence[torch.Tensor]
    """What it is handed by other layers."""
    wanted: Sequence[torch.Tensor]
    """What backward computes gradients of: differentiable inputs and parameters."""
    consumers: Sequence[int]
    """How many layers take each result; their gradients are summed when backward starts."""

    @property
    def has_backward(self) -> bool:
        """Whether anything flows back at all."""
        return bool(self.consumers) and bool(self.wanted)

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> Any:
        """One backward from the gradients that each of a result's consumers sends."""
        summed = [sum_of_copies(g, n) for g, n in zip(gradients, self.consumers, strict=True)]
        return torch.autograd.grad(outputs, self.wanted, summed, allow_unused=True)


def sum_of_copies(gradient: torch.Tensor, copies: int) -> torch.Tensor:
    """The additions that a value taken by several layers needs before its backward."""
    total = gradient
    for _ in range(copies - 1):
        total = total + gradient
    return total


class Stopwatch(Protocol):
    """Times work on one kind of device."""

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Everything that is measured must be built and run inside of this."""
        ...

    def measure(self, work: Work) -> Measured:
        """Median and spread of both passes."""
        ...

    def whole(self, step: Callable[[], Any]) -> float:
        """Median seconds of a whole step."""
        ...


class CpuStopwatch:
    """The wall clock."""

    def __init__(self) -> None:
        self.engine_start = EngineStart()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Nothing to prepare."""
        return contextlib.nullcontext()

    def measure(self, work: Work) -> Measured:
        """Alternates forward and backward, as training does."""
        forward: list[float] = []
        backward: list[float] = []

        def once() -> None:
            start = time.perf_counter()
            outputs = work.forward()
            forward.append(time.perf_counter() - start)
            if work.has_backward:
                gradients = [torch.ones_like(output) for output in outputs]
                start = time.perf_counter()
                work.backward(outputs, gradients)
                seconds = time.perf_counter() - start
                backward.append(max(0.0, seconds - self.engine_start.seconds(len(work.wanted))))

        repeat(once)
        return Measured.of(forward[1:], backward[1:] or [0.0])  # the first pass warms up

    def whole(self, step: Callable[[], Any]) -> float:
        """Forward, loss and backward in one piece."""
        times: list[float] = []

        def once() -> None:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)

        repeat(once)
        return statistics.median(times[1:])


class CudaStopwatch:
    """CUDA graphs between CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._anchor = torch.cuda.CUDAGraph()  # keeps the memory pool, which all later graphs use, alive
        with torch.cuda.stream(self._stream):
            self._anchor.capture_begin()
            self._kept = torch.zeros(1, device=device)
            self._anchor.capture_end()
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._spoiler = torch.empty(2 * cache_bytes // 4, device=device)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The stream that is captured: autograd runs a backward on the stream where its graph was built."""
        return torch.cuda.stream(self._stream)

    def measure(self, work: Work) -> Measured:
        """Each pass as what a graph takes longer with it than without.

        In a step, a layer finds the values it is handed in the cache, and its weights and what it kept since its
        forward in memory. So the cache is spoilt and what is handed over is read again before each pass.
        (A backward cannot be captured without its forward: attention's reads the random state its forward left.)
        """
        with torch.cuda.stream(self._stream):
            gradients = [torch.ones_like(output) for output in work.forward()]

        def before_forward() -> None:
            self._spoil_cache(then_read=work.inputs)

        def forward() -> Sequence[torch.Tensor]:
            before_forward()
            return work.forward()

        def before_backward() -> Sequence[torch.Tensor]:
            outputs = forward()
            self._spoil_cache(then_read=gradients)
            return outputs

        def backward() -> None:
            work.backward(before_backward(), gradients)

        with torch.cuda.stream(self._stream):
            for _ in range(2):  # libraries choose their kernels on the first call
                backward() if work.has_backward else forward()
        forward_times = self._longer(forward, before_forward)
        return Measured.of(forward_times, self._longer(backward, before_backward) if work.has_backward else [0.0])

    def whole(self, step: Callable[[], Any]) -> float:
        """The step as one graph, as a well-run job would replay it."""
        with torch.cuda.stream(self._stream):
            step()
            step()
        return statistics.median(self._graphed(step))

    def _longer(self, function: Callable[[], Any], without: Callable[[], Any]) -> list[float]:
        base_s = statistics.median(self._graphed(without))
        return [max(0.0, seconds - base_s) for seconds in self._graphed(function)]

    def _spoil_cache(self, *, then_read: Sequence[torch.Tensor]) -> None:
        self._spoiler.fill_(0.0)
        for tensor in then_read:
            tensor.detach().clone()

    def _graphed(self, function: Callable[[], Any]) -> list[float]:
        """Seconds of one call: first of a graph that holds one, then of one that holds enough to hide its launch."""
        once_s = statistics.median(self._replays(function, copies=1, repeats=_MIN_REPLAYS))
        copies = max(1, min(_MAX_COPIES, round(_GRAPH_S / once_s)))
        repeats = max(_MIN_REPLAYS, min(MAX_REPEATS, round(_REPLAYS_S / (once_s * copies))))
        return self._replays(function, copies=copies, repeats=repeats)

    def _replays(self, function: Callable[[], Any], *, copies: int, repeats: int) -> list[float]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # Not `torch.cuda.graph(…)`: it collects garbage and empties the allocator's cache, 0.1 s a layer.
            graph.capture_begin(pool=self._anchor.pool())
            try:
                for _ in range(copies):
                    function()
            finally:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a layer of views only
                    graph.capture_end()
            graph.replay()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            self._stream.synchronize()
        return [a.elapsed_time(b) / 1e3 / copies for a, b in itertools.pairwise(events)]


def stopwatch(device: torch.device) -> Stopwatch:
    """The one for this device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Runs with so many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def repeat(once: Callable[[], None], *, target_s: float = TARGET_S, most: int = MAX_REPEATS) -> None:
    """Once to warm up, then for about the target time."""
    once()
    start = time.perf_counter()
    for done in range(1, most + 1):
        once()
        if done >= MIN_REPEATS and time.perf_counter() - start > target_s:
            return


class EngineStart:
    """What a backward of its own costs a layer over being part of a longer one.

    Chains of tiny layers, without and with two parameters each, go back in one piece and layer by layer.
    """

    def __init__(self) -> None:
        bare, with_two = _split_cost_s(num_parameters=0), _split_cost_s(num_parameters=2)
        self._bare_s, self._parameter_s = bare, max(0.0, with_two - bare) / 2

    def seconds(self, num_wanted: int) -> float:
        """For a layer with so many gradients to compute, its input's included."""
        return self._bare_s + self._parameter_s * max(0, num_wanted - 1)


def _split_cost_s(*, num_parameters: int) -> float:
    layers = [[torch.zeros(1, requires_grad=True) for _ in range(num_parameters)] for _ in range(_CHAIN)]
    gradient, first = torch.zeros(1), torch.zeros(1, requires_grad=True)
    everything = [first, *(tensor for layer in layers for tensor in layer)]

    def forward(value: torch.Tensor, layer: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.addcmul(layer[1], value, layer[0]) if layer else value * 2.0

    whole, split = [], []
    for _ in range(100):
        value = first
        for layer in layers:
            value = forward(value, layer)
        start = time.perf_counter()
        torch.autograd.grad((value,), everything, (gradient,), allow_unused=True)
        whole.append(time.perf_counter() - start)
        seconds = 0.0
        for layer in layers:
            leaf = torch.zeros(1, requires_grad=True)
            result = forward(leaf, layer)
            start = time.perf_counter()
            torch.autograd.grad((result,), (leaf, *layer), (gradient,), allow_unused=True)
            seconds += time.perf_counter() - start
        split.append(seconds)
    return max(0.0, (statistics.median(split) - statistics.median(whole)) / (_CHAIN - 1))


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return high - low
