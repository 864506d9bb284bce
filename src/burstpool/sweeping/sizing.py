"""Sizing: how many trials an array should hold, and how fast training one after another would be.

Takes the first trial's job and trains copies of it for a few steps that count for nothing. Returns a `Sizing`, which is
written down before the sweep begins: what follows then depends on no clock, and a resumed sweep makes the same moves.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from burstpool.artifact import STRICT
from burstpool.fusion.array import Execution
from burstpool.fusion.group import array_size, member_bytes
from burstpool.job import Job, model_arguments
from burstpool.sweeping.feed import Feed
from burstpool.sweeping.options import StepOptions
from burstpool.sweeping.trial_array import TrialArray

_GAIN = 1.1
"""More throughput than this counts."""
_MOST_PLACES = 256
_STEPS, _REPEATS = 4, 6
"""Runs of so many steps that are timed, after one that is not."""
_ENOUGH_S = 0.5
"""Timing ends early after so long."""
_SLOTS = 2
"""Tensors of optimizer state a weight, where memory is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What was measured, and what follows."""

    __pydantic_config__ = STRICT

    places: int
    """Members of an array."""
    serial_samples_per_s: float
    """One plain model with its optimizer, no array: what training one after another reaches."""
    samples_per_s: Mapping[int, float]
    """Members → samples/s over all of them, for the sizes that were tried."""


def measure_sizing(
    job: Job,
    *,
    most: int,
    places: int | None,
    device: torch.device,
    mode: Execution,
    batch: int | None,
    options: StepOptions,
    tell: Callable[[int], None] = lambda _: None,
) -> Sizing:
    """How fast arrays of several sizes train, and which size is best; `places` is taken as given.

    `tell` hears of each size before it is measured.
    """
    samples = batch or job.batch
    serial = samples / _serial_step_s(job, device, samples, options)
    if places is not None:
        return Sizing(places=places, serial_samples_per_s=serial, samples_per_s={})
    trial_array = TrialArray(device=device, mode=mode, batch=batch, options=options)
    found = _throughputs(job, trial_array, most=min(most, _MOST_PLACES), tell=tell)
    return Sizing(places=smallest_fast(found or {1: serial}), serial_samples_per_s=serial, samples_per_s=found)


def smallest_fast(samples_per_s: Mapping[int, float]) -> int:
    """The smallest size that is within 10% of the fastest; unlike the first knee it forgives one bad measurement."""
    enough = max(samples_per_s.values()) / _GAIN
    return min(size for size, rate in samples_per_s.items() if rate >= enough)


def _throughputs(job: Job, trial_array: TrialArray, *, most: int, tell: Callable[[int], None]) -> dict[int, float]:
    """Samples/s by size: doubled until two in a row do not bring 10% more, or memory ends."""
    device, samples = trial_array.device, trial_array.batch or job.batch
    found: dict[int, float] = {}
    size, in_vain, peaks = 1, 0, [0, 0]
    while True:
        tell(size)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # the serial step's, or the smaller array's, is another
        try:
            while len(trial_array.numbers) < size:
                trial_array.place(len(trial_array.numbers), job, job.build_model(), None)
            rate = size * samples / _array_step_s(trial_array)
        except torch.OutOfMemoryError:
            return found
        in_vain = 0 if rate >= _GAIN * max(found.values(), default=0.0) else in_vain + 1
        found[size] = rate
        if size <= 2:
            peaks[size - 1] = _peak_bytes(trial_array, samples, size)
        if size == 2:
            most = min(most, array_size(one_bytes=peaks[0], two_bytes=peaks[1], memory_bytes=_memory_bytes(device)))
        if in_vain == 2 or size >= most:
            return found
        size = min(2 * size, most)


def _serial_step_s(job: Job, device: torch.device, samples: int, options: StepOptions) -> float:
    """A step of one model as its user would write it."""
    model = job.build_model().to(device)
    optimizer = job.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=options.autocast == "fp16")
    feed = Feed([job], [0], batch=samples, device=device)

    def train() -> None:
        for _ in range(_STEPS):
            batch = feed.take()
            args, kwargs = model_arguments(batch.inputs)
            optimizer.zero_grad()
            with options.autocasting(device):
                loss = job.loss(model(*args, **kwargs), batch.target)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if options.clip_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
            scaler.step(optimizer)
            scaler.update()

    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout must not move the user's stream
        return _step_s(train, device)


def _array_step_s(trial_array: TrialArray) -> float:
    steps = [0] * len(trial_array.numbers)
    return _step_s(lambda: trial_array.run(_STEPS, steps, lambda: False), trial_array.device)


def _step_s(train: Callable[[], object], device: torch.device) -> float:
    """Seconds a step, the smallest of a few: what else the machine does only ever adds."""
    train()  # chooses lowerings, records graphs
    times_s: list[float] = []
    while not times_s or (len(times_s) < _REPEATS and sum(times_s) < _ENOUGH_S):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        train()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - begin)
    return min(times_s) / _STEPS


def _peak_bytes(trial_array: TrialArray, samples: int, size: int) -> int:
    if trial_array.device.type == "cuda":
        return torch.cuda.max_memory_allocated(trial_array.device)
    assert trial_array.array is not None
    return size * member_bytes(trial_array.array, samples=samples, slots=_SLOTS)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
