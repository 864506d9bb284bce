"""Measure: every layer of a traced model, at several batches, on a device of this machine.

Takes a `TracedModel`. Returns a `Profile`. Layers run alone (`sweep.py`), never holding more than a few layers'
memory; on the CPU, models that fit into memory whole are timed inside of real steps instead (`in_step.py`). The
whole step is timed in one piece beside them where it fits, so that the profile can say how far its layers' sum is
from the truth. Where the job is known, loading its samples and its optimizer are timed there too.
"""

import contextlib
import functools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from burstpool.cluster import catalogue
from burstpool.errors import BurstpoolError, ProfileError
from burstpool.job import Job
from burstpool.limits import LARGEST_BATCH, available_bytes, in_gib, is_out_of_memory
from burstpool.model.block import Block
from burstpool.model.replay import sum_of_outputs
from burstpool.model.trace import TracedModel, trace
from burstpool.profiling import cache
from burstpool.profiling.in_step import measure_in_step
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.profiling.rest import MeasuredRest
from burstpool.profiling.session import AUTOCAST, Session
from burstpool.profiling.sweep import LayerRun, sweep
from burstpool.profiling.timing import CpuStopwatch, Measured, Stopwatch, num_threads, stopwatch
from burstpool.version import __version__

DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_EXAMPLE_BATCH = 5
"""Samples of a job's data that its model is traced with; a number that other sizes seldom have."""
_WHOLE_STEP_BYTES = 2**31
"""On the CPU, steps whose activations are larger are not run in one piece."""

Progress = Callable[[int, int, str], None]
"""Told (done, total, what comes next)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchResult:
    """All that was measured at one batch."""

    runs: Sequence[LayerRun]
    times: Sequence[Measured]
    loss: Measured
    whole_s: float | None
    rest: MeasuredRest | None = None


def profile(
    traced: TracedModel,
    *,
    device: str = "cpu",
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    target: Any = None,
    autocast: str | None = None,
    name: str | None = None,
    job: Job | None = None,
    threads: int = 1,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> Profile:
    """Measures each layer's forward and backward at each batch.

    `device` is `"cpu"` (one worker of so many `threads`) or `"cuda"`, `"cuda:1"`, …; the model is moved there.
    `loss(output, target)` is timed beside the layers; `target` belongs to the example the model was traced with.
    With a `job`, its samples are loaded and its optimizer steps between the measured steps, on the CPU.
    Batches measured before, of the same layers on the same device with the same versions, come from the cache.
    """
    wanted = _checked_batches(batches)
    cores = os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise ProfileError(f"threads={threads} must be 1 to {cores}, the cores of this machine")
    if autocast not in (None, *AUTOCAST):
        raise ProfileError(f"autocast={autocast!r} is not one of {', '.join(AUTOCAST)}")
    session = Session(
        traced=traced,
        device=_checked_device(device),
        autocast=autocast,
        loss=loss or (lambda output, target: sum_of_outputs(output)),
        target=target,
        job=job,
    )
    measurement = _Measurement(session, name=name or traced.graph.model, threads=threads)
    path = cache.path(measurement.description())
    known = cache.read(path) if use_cache else None
    missing = [batch for batch in wanted if known is None or batch not in known.batches]
    if missing:
        for part in measurement.run(missing, progress or (lambda done, total, what: None)):
            known = part if known is None else cache.merged(known, part)
            if use_cache:
                cache.write(path, known)  # after each batch: what is measured outlives an interruption
    assert known is not None
    return cache.selected(known, wanted)


def profile_job(job: Job, *, fallback: Literal["modules"] | None = None, **options: Any) -> Profile:
    """Traces a job's model on its own data and measures it with its own loss; `options` as for `profile`."""
    example, target = job.samples(_EXAMPLE_BATCH)
    traced = trace(job.build_model().train(), example, fallback=fallback)
    return profile(traced, loss=job.loss, target=target, name=job.name, job=job, **options)


class _Measurement:
    """Runs the batches and puts the results together."""

    def __init__(self, session: Session, *, name: str, threads: int) -> None:
        self.session, self.name, self.threads = session, name, threads
        self.blocks: list[Block] = session.traced.blocks()

    def description(self) -> list[str]:
        """All that the result depends on."""
        device = self.session.device
        options = [device_name(device, self.threads), self._dtype(), str(self.session.autocast), self.name]
        options += [_hardware(device, self.threads), __version__, _identity(self.session.loss), str(_backend_flags())]
        versions = [f"{name} {version}" for name, version in _versions(self.session.device).items()]
        layers = [f"{block.layers[0].name}: {block.signature()}" for block in self.blocks]
        rest = (
            []
            if self.session.job is None
            else ["with the rest of a step, its samples", _identity(self.session.job.optimizer)]
        )
        return [*options, str(self.session.traced.graph.training), *versions, *layers, *rest]

    def run(self, batches: Sequence[int], progress: Progress) -> Iterator[Profile]:
        """A profile of each batch, the largest first, so that running out of memory shows at once."""
        self.session.traced.model.to(self.session.device)
        steps = len(batches) * (len(self.blocks) + 1)
        done = 0

        def report(what: str) -> None:
            nonlocal done
            progress(done, steps, what)
            done += 1

        with num_threads(self.threads), self.session.model_left_as_it_was():
            watch = stopwatch(self.session.device)
            for batch in sorted(batches, reverse=True):
                with watch.context():
                    result = self._checked(batch, functools.partial(self._batch, batch, watch, report))
                yield self._profile({batch: result})
        progress(steps, steps, "done")

    def _batch(self, batch: int, watch: Stopwatch, report: Callable[[str], None]) -> _BatchResult:
        self._check_memory(batch)
        if isinstance(watch, CpuStopwatch) and self._fits_whole(batch):
            runs, _ = sweep(self.session, self.blocks, batch, watch=None, report=report)
            report(f"whole steps, batch {batch}")
            step = measure_in_step(self.session, self.blocks, batch, watch)
            return _BatchResult(runs=runs, times=step.layers, loss=step.loss, whole_s=step.whole_s, rest=step.rest)
        runs, alone = sweep(self.session, self.blocks, batch, watch=watch, report=report)
        report(f"whole step, batch {batch}")
        whole = None
        if self._fits_whole(batch):
            with contextlib.suppress(torch.OutOfMemoryError):  # the layers fit one by one
                whole = watch.whole(self.session.step(batch))
        assert alone is not None
        return _BatchResult(runs=runs, times=[run.time for run in runs if run.time], loss=alone, whole_s=whole)

    def _checked(self, batch: int, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except BurstpoolError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise ProfileError(
                    f"{self.name} runs out of memory at batch {batch}; leave it out, and try smaller ones"
                ) from None
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ProfileError(f"{self.name} cannot run a step of batch {batch}: {reason}") from error

    def _check_memory(self, batch: int) -> None:
        """On the CPU the system kills who takes more than there is; a layer's result and its gradient are the least."""
        if self.session.device.type != "cpu":
            return
        needed = 2 * max((value.bytes_at(batch) for value in self.session.traced.graph.values().values()), default=0)
        if needed > available_bytes():
            raise ProfileError(
                f"{self.name} runs out of memory at batch {batch}: one layer needs {in_gib(needed)}, and "
                f"{in_gib(available_bytes())} are free here; leave it out, and try smaller ones"
            )

    def _fits_whole(self, batch: int) -> bool:
        """Whether a whole step's activations, about two copies of every value, can be held at once."""
        needed = 2 * sum(value.bytes_at(batch) for value in self.session.traced.graph.values().values())
        if self.session.device.type == "cuda":
            return needed < torch.cuda.mem_get_info(self.session.device)[0]
        return needed < _WHOLE_STEP_BYTES

    def _profile(self, results: Mapping[int, _BatchResult]) -> Profile:
        device = self.session.device
        rest = {batch: found.rest for batch, found in results.items() if found.rest is not None}
        return Profile(
            model=self.name,
            device=device_name(device, self.threads),
            source=f"measured on {_hardware(device, self.threads)}",
            layers=tuple(self._layer(index, results) for index in range(len(self.blocks))),
            dtype=self._dtype(),
            autocast=self.session.autocast,
            step_s={batch: found.whole_s for batch, found in results.items() if found.whole_s is not None},
            loss_forward_s={batch: found.loss.forward_s for batch, found in results.items()},
            loss_backward_s={batch: found.loss.backward_s for batch, found in results.items()},
            load_s={batch: found.load_s for batch, found in rest.items()} if len(rest) == len(results) else {},
            update_bytes_per_s=rest[max(rest)].update_bytes_per_s if rest else None,
            versions=_versions(device),
        )

    def _layer(self, index: int, results: Mapping[int, _BatchResult]) -> LayerProfile:
        layer = self.session.traced.layers[index]
        producers = self.session.traced.graph.producers()
        times = {batch: found.times[index] for batch, found in results.items()}
        largest = max(results)
        return LayerProfile(
            name=layer.name,
            inputs=tuple(dict.fromkeys(producers[value] for value in layer.inputs)),
            parameter_bytes=layer.parameter_bytes,
            output_bytes_per_sample=sum(results[largest].runs[index].kept.output_bytes) // largest,
            forward_s={batch: time.forward_s for batch, time in times.items()},
            backward_s={batch: time.backward_s for batch, time in times.items()},
            forward_spread_s={batch: time.forward_spread_s for batch, time in times.items()},
            backward_spread_s={batch: time.backward_spread_s for batch, time in times.items()},
            activation_bytes={batch: self._activation_bytes(found.runs, index) for batch, found in results.items()},
            peak_memory_bytes={batch: found.runs[index].peak_bytes for batch, found in results.items()},
            flops_per_sample=layer.flops_per_sample,
            kind=layer.kind,
        )

    def _activation_bytes(self, runs: Sequence[LayerRun], index: int) -> int:
        """What stays until backward because of this layer: its own, and its outputs if anyone keeps them."""
        kept_later = {
            block.inputs[place] for block, run in zip(self.blocks, runs, strict=True) for place in run.kept.inputs
        }
        own = runs[index].kept
        names = self.blocks[index].outputs
        return own.inside_bytes + sum(
            size
            for place, (name, size) in enumerate(zip(names, own.output_bytes, strict=True))
            if place in own.outputs or name in kept_later
        )

    def _dtype(self) -> str:
        dtype = next((p.dtype for p in self.session.traced.model.parameters()), torch.float32)
        if dtype not in DTYPES:
            raise ProfileError(f"{self.name} has parameters of {dtype}; only {', '.join(DTYPES.values())} are measured")
        convolves = any("conv" in layer.kind for layer in self.session.traced.layers)
        in_tf32 = torch.backends.cuda.matmul.allow_tf32 or (convolves and torch.backends.cudnn.allow_tf32)
        return "tf32" if dtype is torch.float32 and self.session.device.type == "cuda" and in_tf32 else DTYPES[dtype]


def device_name(device: torch.device, threads: int) -> str:
    """The type of device as the catalogue names it, where it knows it."""
    if device.type == "cuda":
        reported = torch.cuda.get_device_name(device)
        return catalogue.match(reported) or reported
    return "cpu-core" if threads == 1 else f"cpu-{threads}-cores"


def _checked_device(device: str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ProfileError(f"unknown device {device!r}; pass cpu, cuda or cuda:N") from None
    if target.type not in ("cpu", "cuda"):
        raise ProfileError(f"cannot measure on device {device!r}; pass cpu, cuda or cuda:N")
    if target.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (target.index or 0) >= count:
            raise ProfileError(f"device {device!r} is not here: this machine has {count} CUDA devices")
        return torch.device("cuda", target.index or 0)
    return target


def _checked_batches(batches: Sequence[int]) -> list[int]:
    if not batches:
        raise ProfileError("no batches to measure; pass e.g. batches=[1, 2, 4]")
    for batch in batches:
        if batch < 1:
            raise ProfileError(f"batch {batch} must be at least 1")
        if batch > LARGEST_BATCH:
            raise ProfileError(f"batch {batch} must be at most {LARGEST_BATCH}; pass e.g. batches=[1, 2, 4]")
    return sorted(set(batches))


def _identity(loss: Callable[..., Any]) -> str:
    """Tells one loss from another as far as its code goes."""
    code = getattr(loss, "__code__", None)
    text = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', repr(loss))}"
    return text if code is None else f"{text} {code.co_code.hex()} {code.co_consts!r} {code.co_names}"


def _backend_flags() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)


def _versions(device: torch.device) -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    return found


def _hardware(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, each layer in CUDA graphs"
    return f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
