"""Detection: what this machine has, as a cluster of one node.

Decides which devices to count: CUDA GPUs where there are any, else one CPU worker a core. A GPU the catalogue
knows keeps the catalogue's peak rates; one it does not know, and a CPU core, get measured rates. The link is
measured between two devices and taken for all pairs. Sees this machine only; neither NUMA nor uneven links.
"""

import os
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

from burstpool.cluster import catalogue
from burstpool.cluster.catalogue import Link, in_units
from burstpool.cluster.measure import DeviceRates, core_rates, cuda_rates, fit_link, link_times
from burstpool.cluster.messages import message_times
from burstpool.cluster.reductions import reduce_times
from burstpool.cluster.spec import ClusterSpec, DeviceCount, DeviceFigures, NodeGroup, plural
from burstpool.errors import ClusterError
from burstpool.limits import machine_memory_bytes, system_file

TIMEOUT_S = 120.0
"""How long one measurement may take, the start of its processes included."""
_WORKER_BYTES = 128 << 20
"""That a process with torch in it takes, at least."""

DeviceKind = Literal["auto", "cpu", "cuda"]


def detect(
    *,
    measure: bool = True,
    device: DeviceKind = "auto",
    num_devices: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> ClusterSpec:
    """This machine, measured in a few seconds, or in no time from the catalogue alone with `measure=False`.

    `num_devices` is how many workers to count on a CPU (more than its cores share them), or how many GPUs.
    """
    if num_devices is not None and num_devices < 1:
        raise ClusterError(f"--devices {num_devices} makes no cluster; give 1 or more")
    use_cuda = device != "cpu" and _cuda_count(required=device == "cuda") > 0
    if use_cuda:
        types, figures = _cuda_devices(num_devices, measure=measure, progress=progress)
    else:
        types, figures = _cpu_devices(num_devices, measure=measure, progress=progress)
    link = None
    if len(types) > 1:
        link = _link(use_cuda=use_cuda, measure=measure, progress=progress)
        link = link if use_cuda else _on_cores(link, len(types), measure=measure, progress=progress)
    devices = tuple(DeviceCount(type=name, count=len(list(run))) for name, run in groupby(types))
    return ClusterSpec(
        name=platform.node() or "this machine",
        node_groups=(NodeGroup(name="this machine", devices=devices, link=link),),
        device_types=figures,
    )


def num_cores() -> int:
    """Cores this process may use: affinity and a container's quota counted."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    quota, _, period = system_file("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, -(-int(quota) // int(period)))
    return max(cores, 1)


def check_workers(num_devices: int) -> None:
    """Refuses more processes than this machine's memory holds; each needs some however small its part of the work."""
    most = max(1, machine_memory_bytes() // _WORKER_BYTES)
    if num_devices > most:
        raise ClusterError(
            f"--devices {num_devices} are more workers than this machine's memory holds; give --devices {most} or fewer"
        )


def _cpu_devices(
    num_devices: int | None, *, measure: bool, progress: Callable[[str], None]
) -> tuple[list[str], tuple[DeviceFigures, ...]]:
    cores = num_cores()
    workers = num_devices or cores
    check_workers(workers)
    if measure:
        progress("measuring a core")
        rates = core_rates(timeout_s=TIMEOUT_S)
        flops_per_s, memory_bytes_per_s = rates.flops_per_s, rates.copy_bytes_per_s
        how = "one thread measured alone: matrix products, and a copy of 128 MiB"
    else:
        known = catalogue.device_type("cpu-core")
        flops_per_s, memory_bytes_per_s = dict(known.flops_per_s), known.memory_bytes_per_s
        how = "rates assumed, not measured"
    share = min(1.0, cores / workers)  # workers beyond the cores take turns
    figures = DeviceFigures(
        name="cpu-core",
        memory_bytes=machine_memory_bytes() // workers,
        memory_bytes_per_s=_rounded(memory_bytes_per_s * share),
        flops_per_s={dtype: _rounded(rate * share) for dtype, rate in flops_per_s.items()},
        source=f"{plural(workers, 'worker')} on {plural(cores, 'core')}; {how}",
    )
    return ["cpu-core"] * workers, (figures,)


def _cuda_count(*, required: bool) -> int:
    import torch

    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if required and not present:
        raise ClusterError("torch sees no CUDA device here; leave out --device cuda, or install a CUDA build of torch")
    return present


def _cuda_devices(
    num_devices: int | None, *, measure: bool, progress: Callable[[str], None]
) -> tuple[list[str], tuple[DeviceFigures, ...]]:
    import torch

    present = torch.cuda.device_count()
    wanted = num_devices or present
    if wanted > present:
        raise ClusterError(
            f"--devices {wanted} are more than the {plural(present, 'GPU')} torch sees; give --devices {present}"
        )
    reported = [torch.cuda.get_device_name(index) for index in range(wanted)]
    types = [catalogue.match(name) or name for name in reported]
    figures = []
    for name in Counter(types):
        index = types.index(name)
        properties = torch.cuda.get_device_properties(index)
        rates = None
        if measure and (catalogue.match(reported[index]) is None or wanted == 1):
            progress(f"measuring {name}")
            rates = cuda_rates(index, timeout_s=TIMEOUT_S)
        figures.append(_cuda_figures(name, properties, rates))
    return types, tuple(figures)


def _cuda_figures(name: str, properties: Any, rates: DeviceRates | None) -> DeviceFigures:
    """A known GPU keeps the catalogue's peaks: two types are compared by peaks, and a measured rate beside
    another's peak would mislead."""
    known = name in catalogue.names()
    if not known and rates is None:
        raise ClusterError(f"GPU {name!r} is not in the catalogue, so it must be measured; leave out --no-measure")
    seen = ""
    if rates:
        best = ", ".join(f"{key} {in_units(rate, 'FLOP/s')}" for key, rate in rates.flops_per_s.items())
        seen = f"; measured alone, matrix products reached {best}, a copy {in_units(rates.copy_bytes_per_s, 'B/s')}"
    return DeviceFigures(
        name=name,
        memory_bytes=properties.total_memory,
        memory_bytes_per_s=_rounded(rates.copy_bytes_per_s) if rates and not known else None,
        flops_per_s={key: _rounded(rate) for key, rate in rates.flops_per_s.items()} if rates and not known else {},
        multiprocessors=properties.multi_processor_count,
        source=f"memory as the driver reports it{seen}",
    )


def _link(*, use_cuda: bool, measure: bool, progress: Callable[[str], None]) -> Link:
    if not measure:
        preset = catalogue.link("pcie4" if use_cuda else "loopback")
        return Link(bytes_per_s=preset.bytes_per_s, latency_s=preset.latency_s, source=f"{preset.source}, assumed")
    if not use_cuda:
        return _message_link(progress)
    progress("measuring the link between two devices (nccl)")
    times = link_times("nccl", timeout_s=TIMEOUT_S)
    bytes_per_s, latency_s = fit_link(times.seconds)
    source = f"measured: nccl ping-pong between GPU 0 and GPU 1; slowest batch {times.slowest:.2g} x the fastest"
    return Link(bytes_per_s=_rounded(bytes_per_s), latency_s=_rounded(latency_s), source=source)


def _message_link(progress: Callable[[str], None]) -> Link:
    progress("measuring messages between workers that compute")
    times = message_times(timeout_s=TIMEOUT_S)
    bytes_per_s, latency_s = fit_link(times.seconds)
    return Link(
        bytes_per_s=_rounded(bytes_per_s),
        latency_s=_rounded(latency_s),
        send_s=_rounded(times.send_s),
        source="measured: gloo messages between two workers of this machine, in the middle of training steps",
    )


def _on_cores(link: Link, num_workers: int, *, measure: bool, progress: Callable[[str], None]) -> Link:
    """The link of CPU workers: their cores carry its bytes."""
    if not measure:
        return replace(link, shares_compute=True)
    progress("measuring reductions among workers that compute")
    times = reduce_times(num_workers, num_cores=num_cores(), timeout_s=TIMEOUT_S)
    table = {count: {size: _rounded(time_s) for size, time_s in found.items()} for count, found in times.items()}
    return replace(link, shares_compute=True, reduce_s=table)


def _rounded(value: float) -> float:
    """Four digits: more would claim a precision that no measurement has."""
    return float(f"{value:.4g}")
