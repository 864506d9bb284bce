"""Fusion beside the other ways to train B models: aggregate samples a second, one JSON object and a table.

    python benchmarks/fusion/run.py                                     the CPU part: small models, seconds
    python benchmarks/fusion/run.py --device cuda --dtype bf16          the CUDA part: a few minutes
    python benchmarks/fusion/run.py --device cuda --workloads resnet18,tiny_mlp --members 8,32 --compiled

Ways: serial eager (one model after another), serial graph (a model's whole step in one CUDA graph), vmap (stacked
weights, torch.func), fused (this package's rules), fused measured (lowerings by measuring), and on CUDA the latter
recorded as a CUDA graph. Each time is the smallest of several: what else a machine does only ever adds. Ignores
data loading: every step uses the same batch, already on the device.
"""

import argparse
import contextlib
import copy
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from burstpool.fusion import FusedArray, fuse
from burstpool.fusion.step import RecordedStep
from burstpool.job import Job, load_job, model_arguments

Step = Callable[[], Any]

WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "pointnet_cls": ("pointnet_classification", {}),
    "pointnet_seg": ("pointnet_segmentation", {}),
    "dcgan_d": ("dcgan_discriminator", {}),
    "dcgan_g": ("dcgan_generator", {}),
    "resnet18": ("resnet18", {"image_size": 32, "num_classes": 10, "batch": 128}),
    "mobilenet_v3_large": ("mobilenet_v3_large", {"image_size": 32, "num_classes": 10, "batch": 128}),
    "transformer": ("transformer", {}),
    "bert_medium": ("bert_medium", {}),
    "tiny_mlp": ("tiny_mlp", {}),
    "tiny_gpt": ("gpt_small", {"width": 128, "layers": 4, "heads": 4, "vocabulary": 256, "tokens": 64, "batch": 32}),
}
"""Name here → zoo's name and settings. HFTA's seven, a small MLP, a tiny GPT."""
CPU_WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny_mlp": ("tiny_mlp", {"batch": 8}),
    "tiny_lstm": ("tiny_lstm", {"batch": 8}),
    "tiny_resnet": ("tiny_resnet", {"batch": 8, "width": 8}),
}


def wide_mlp(seed: int) -> Job:
    """784-128-128-10, the MLP of the research notes."""
    layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    data = [(torch.randn(784), i % 10) for i in range(64)]
    return Job(
        model=lambda: copy.deepcopy(nn.Sequential(*layers)),
        loss=nn.functional.cross_entropy,
        data=data,  # type: ignore[arg-type]
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01 * (seed + 1)),
        batch=8,
        seed=seed,
        name="mlp784",
    )


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows = []
    for name in options.workloads:
        for members in options.members:
            row = measured(name, members, device, options)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    print(json.dumps({"device": where, "torch": torch.__version__, "dtype": options.dtype, "rows": rows}))
    print(table(rows), file=sys.stderr)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fusion beside the other ways to train B models.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workloads", default="")
    parser.add_argument("--members", default="")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90.0, help="stop a workload's further ways after this long")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile the fused step")
    parser.add_argument("--skip", default="", help="ways to leave out, e.g. vmap,serial_graph")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    known = [*CPU_WORKLOADS, "mlp784"] if on_cpu else list(WORKLOADS)
    options.workloads = options.workloads.split(",") if options.workloads else known
    options.members = [int(m) for m in (options.members or ("16" if on_cpu else "8,32")).split(",")]
    options.repeats = options.repeats or (40 if on_cpu else 10)
    return options


def measured(name: str, members: int, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Samples a second of each way; a way that fails has its error instead."""
    jobs = [wide_mlp(i) if name == "mlp784" else _job(name, device, i) for i in range(members)]
    inputs, target = jobs[0].samples(jobs[0].batch)
    inputs, target = _to(inputs, device), _to(target, device)
    dtype = torch.bfloat16 if options.dtype == "bf16" else None
    samples = jobs[0].batch
    rates: dict[str, float] = {}
    errors: dict[str, str] = {}
    peak_bytes: dict[str, int] = {}
    started = time.monotonic()
    for way, make in ways(jobs, inputs, target, device, dtype, options.compiled).items():
        if way in options.skip.split(",") or time.monotonic() - started > options.seconds:
            errors[way] = "left out"
            continue
        try:
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            step, models_a_step = make()
            step_s = fastest(step, device, options.repeats)
            rates[way] = models_a_step * samples / step_s
            if device.type == "cuda":
                peak_bytes[way] = torch.cuda.max_memory_allocated()
            del step
        except Exception as error:  # a way that cannot run is a result too
            errors[way] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
    return {"workload": name, "members": members, "batch": samples, "samples_per_s": rates, "errors": errors} | (
        {"peak_bytes": peak_bytes} if peak_bytes else {}
    )


def _job(name: str, device: torch.device, seed: int) -> Job:
    zoo_name, settings = (CPU_WORKLOADS if device.type == "cpu" else WORKLOADS)[name]
    return load_job(f"zoo:{zoo_name}", {**settings, "seed": seed})


def ways(
    jobs: list[Job], inputs: Any, target: Any, device: torch.device, dtype: torch.dtype | None, compiled: bool
) -> dict[str, Callable[[], tuple[Step, int]]]:
    """Way → maker of its step, and how many models one step trains."""
    # On a CPU a few models would stay in its cache, as all of them do not; on a GPU four stand for all.
    some = jobs if device.type == "cpu" else jobs[:4]
    found: dict[str, Callable[[], tuple[Step, int]]] = {
        "serial_eager": lambda: (serial(some, inputs, target, device, dtype), len(some)),
        "vmap": lambda: (vmapped(jobs, inputs, target, device, dtype), len(jobs)),
        "fused": lambda: (fused(jobs, inputs, target, device, dtype, "rules"), len(jobs)),
        "fused_measured": lambda: (fused(jobs, inputs, target, device, dtype, "measured"), len(jobs)),
    }
    if device.type == "cuda":
        found["serial_graph"] = lambda: (graphed(jobs[0], inputs, target, device, dtype), 1)
        found["fused_graph"] = lambda: (recorded(jobs, inputs, target, device, dtype, False), len(jobs))
        if compiled:
            found["fused_compiled_graph"] = lambda: (recorded(jobs, inputs, target, device, dtype, True), len(jobs))
    return found


def _autocast(device: torch.device, dtype: torch.dtype | None) -> Any:
    return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()


def serial(jobs: list[Job], inputs: Any, target: Any, device: torch.device, dtype: torch.dtype | None) -> Step:
    """One model after another, as most people train."""
    models = [job.build_model().to(device) for job in jobs]
    optimizers = [job.optimizer(model.parameters()) for job, model in zip(jobs, models, strict=True)]
    args, kwargs = model_arguments(inputs)

    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            with _autocast(device, dtype):
                loss = jobs[0].loss(model(*args, **kwargs), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def graphed(job: Job, inputs: Any, target: Any, device: torch.device, dtype: torch.dtype | None) -> Step:
    """One model's whole step, recorded: an array of one."""
    return recorded([job], inputs, target, device, dtype, False)


def vmapped(jobs: list[Job], inputs: Any, target: Any, device: torch.device, dtype: torch.dtype | None) -> Step:
    """torch.func over stacked weights, one optimizer over the stacks (rates shared: it has no other)."""
    models = [job.build_model().to(device) for job in jobs]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = jobs[0].optimizer(list(parameters.values()))
    args, kwargs = model_arguments(inputs)

    def one(parameters: Any, buffers: Any) -> Tensor:
        return jobs[0].loss(torch.func.functional_call(base, (parameters, buffers), args, kwargs), target)

    mapped = torch.vmap(one, randomness="different")

    def step() -> None:
        with _autocast(device, dtype):
            losses = mapped(parameters, buffers)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _array(jobs: list[Job], inputs: Any, device: torch.device, mode: Any) -> FusedArray:
    from burstpool.fusion.jobs import attach

    array = fuse([job.build_model().to(device) for job in jobs], inputs, seeds=[job.seed for job in jobs], mode=mode)
    attach(array, jobs)
    return array


def fused(
    jobs: list[Job], inputs: Any, target: Any, device: torch.device, dtype: torch.dtype | None, mode: str
) -> Step:
    """This package, eager."""
    array = _array(jobs, inputs, device, mode)
    optimizer = array.optimizers[0]

    def step() -> None:
        with _autocast(device, dtype):
            losses = array.losses(inputs, jobs[0].loss, target)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def recorded(
    jobs: list[Job], inputs: Any, target: Any, device: torch.device, dtype: torch.dtype | None, compiled: bool
) -> Step:
    """This package, the whole step in one CUDA graph."""
    array = _array(jobs, inputs, device, "measured")
    step = RecordedStep(array, array.optimizers[0], jobs[0].loss, inputs, target, autocast=dtype, compiled=compiled)
    return lambda: step(inputs, target)


def fastest(step: Step, device: torch.device, repeats: int) -> float:
    """Seconds of one step, the smallest of several groups of steps."""
    for _ in range(3):
        step()
    _wait(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(2):
            step()
        _wait(device)
        times.append((time.perf_counter() - start) / 2)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _to(value: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def table(rows: list[dict[str, Any]]) -> str:
    """One line a workload and size: samples/s, and the ratio to serial eager."""
    return "\n".join(_lines(rows))


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(way for row in rows for way in row["samples_per_s"]))
    yield "workload              B  " + "  ".join(name.rjust(22) for name in names)
    for row in rows:
        base = row["samples_per_s"].get("serial_eager")
        cells = []
        for name in names:
            rate = row["samples_per_s"].get(name)
            ratio = f" ({rate / base:5.2f}x)" if rate and base else ""
            cells.append((f"{rate:,.0f}{ratio}" if rate else "–").rjust(22))
        yield f"{row['workload']:<20}{row['members']:>3}  " + "  ".join(cells)


if __name__ == "__main__":
    main()
