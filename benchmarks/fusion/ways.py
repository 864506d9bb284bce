"""The ways to train B models that are compared.

Each takes a task and a number of members and builds what it needs; what it returns records the step where there is a
GPU, and gives it and how many models it trains. So that building and compiling need no turn on the GPU. A step runs
forward, backward and optimizer. Baselines get torch's best: optimizers with fused kernels, the whole step
in one CUDA graph wherever it can be recorded. Ignores data loading: every step uses the same batch, on the device.
"""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from workloads import Task

from burstpool.fusion import fuse
from burstpool.fusion.compiled import compiled_ways
from burstpool.fusion.jobs import attach
from burstpool.fusion.step import RecordedStep
from burstpool.job import model_arguments

Step = Callable[[], Any]
Made = Callable[[], tuple[Step, int]]


def autocast(task: Task) -> Any:
    """The number format of the task."""
    return torch.autocast(task.device.type, dtype=task.dtype) if task.dtype else contextlib.nullcontext()


def optimizer_of(task: Task, parameters: Any) -> torch.optim.Optimizer:
    """The job's optimizer; on CUDA with torch's fused kernels, and such that it can be recorded."""
    optimizer = task.job.optimizer(parameters)
    if task.device.type == "cuda":
        for group in optimizer.param_groups:
            group["foreach"], group["fused"] = False, True
            if "capturable" in group:
                group["capturable"] = True
    return optimizer


def one_step(
    task: Task, model: nn.Module, forward: Callable[..., Tensor] | None = None, *, eager: bool = False
) -> Step:
    """One model's step; `eager` with the optimizer as most people have it."""
    parameters = model.parameters()
    optimizer = task.job.optimizer(parameters) if eager else optimizer_of(task, parameters)
    args, kwargs = model_arguments(task.inputs)
    run = forward or (lambda target: task.job.loss(model(*args, **kwargs), target))

    def step() -> None:
        with autocast(task):
            loss = run(task.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def recorded(step: Step) -> Step:
    """The step as a CUDA graph; what it uses stays alive with the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(kept: Any = step) -> None:
        graph.replay()

    return replay


def serial_eager(task: Task, members: int) -> Made:
    """One model after another, as most people train."""
    models = task.models(members if task.device.type == "cpu" else min(members, 4))
    steps = [one_step(task, model, eager=True) for model in models]

    def step() -> None:
        for one in steps:
            one()

    return lambda: (step, len(models))


def serial_graph(task: Task, members: int) -> Made:
    """One model's whole step as a CUDA graph, again and again."""
    step = one_step(task, task.models(1)[0])
    return lambda: (recorded(step), 1)


def serial_compiled(task: Task, members: int) -> Made:
    """The same, forward and backward compiled by Inductor first."""
    model = task.models(1)[0]
    args, kwargs = model_arguments(task.inputs)
    forward = torch.compile(lambda target: task.job.loss(model(*args, **kwargs), target), dynamic=False)
    step = one_step(task, model, forward)
    step()
    return lambda: (recorded(step), 1)


def streams(task: Task, members: int) -> Made:
    """B models' graphs on B streams."""
    steps = [one_step(task, model) for model in task.models(members)]

    def ready() -> tuple[Step, int]:
        graphs, sides = [recorded(step) for step in steps], [torch.cuda.Stream() for _ in steps]
        return lambda: _side_by_side(graphs, sides), members

    return ready


def _side_by_side(graphs: list[Step], sides: list[torch.cuda.Stream]) -> None:
    current = torch.cuda.current_stream()
    for graph, side in zip(graphs, sides, strict=True):
        side.wait_stream(current)
        with torch.cuda.stream(side):
            graph()
    for side in sides:
        current.wait_stream(side)


def _vmapped(task: Task, members: int, compiled: bool) -> Step:
    models = task.models(members)
    parameters, buffers = torch.func.stack_module_state(models)
    base = models[0]  # not on "meta": moving a model there parts weights that it shares with itself
    optimizer = optimizer_of(task, list(parameters.values()))
    args, kwargs = model_arguments(task.inputs)

    def one(parameters: Any, buffers: Any) -> Tensor:
        return task.job.loss(torch.func.functional_call(base, (parameters, buffers), args, kwargs), task.target)

    mapped = torch.vmap(one, randomness="different")
    if compiled:
        mapped = torch.compile(mapped, dynamic=False)

    def step() -> None:
        with autocast(task):
            losses = mapped(parameters, buffers)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def vmap(task: Task, members: int) -> Made:
    """torch.func over stacked weights, one optimizer over the stacks; as a CUDA graph on CUDA."""
    step = _vmapped(task, members, False)
    return lambda: ((step if task.device.type == "cpu" else recorded(step)), members)


def vmap_compiled(task: Task, members: int) -> Made:
    """The same, compiled by Inductor first."""
    step = _vmapped(task, members, True)
    step()
    return lambda: (recorded(step), members)


def fused_array(task: Task, members: int, mode: Any) -> Any:
    """The task's models as an array, with its optimizer."""
    array = fuse(task.models(members), task.inputs, mode=mode)
    attach(array, [task.job] * members)
    return array


def fused_eager(task: Task, members: int, mode: Any = "rules") -> Made:
    """This package, without a recorded step."""
    array = fused_array(task, members, mode)
    optimizer = array.optimizers[0]

    def step() -> None:
        with autocast(task):
            losses = array.losses(task.inputs, task.job.loss, task.target)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: (step, members)


def fused_fastest(task: Task, members: int) -> Made:
    """This package, `mode="fastest"`, without a recorded step."""
    return fused_eager(task, members, "fastest")


def ours(task: Task, members: int) -> Made:
    """This package: `mode="fastest"`, the whole step recorded, compiled where that is faster."""
    recorded_array(task, fused_array(task, 2, "measured"), compiled=False)  # compiles our kernels into their cache
    array = fused_array(task, members, "fastest")
    ways, _ = compiled_ways(array, task.job.loss, autocast=task.dtype)
    for way in ways.values() if task.compiled else ():
        with contextlib.suppress(Exception):  # a way that cannot be had; the step says why
            way(task.inputs, [task.target])
    array.optimizers[0].zero_grad()
    gc.collect()
    torch.cuda.empty_cache()

    def ready() -> tuple[Step, int]:
        step = recorded_array(task, array, compiled=task.compiled)
        inputs, targets = step.batch  # every step uses the same batch, as the other ways' graphs do
        replay: Any = lambda: step(inputs, *targets)  # noqa: E731
        choices = [str(plan.choice) for plan in array.mode.plans() if plan.choice]
        compared = [f"{way} {1e3 * time_s:.3g} ms" for way, time_s in step.times_s.items() if way not in step.left_out]
        left_out = [f"no {way}: {why}" for way, why in step.left_out.items()]
        replay.choice = ", ".join([step.way, *choices, *compared, *left_out])
        return replay, members

    return ready


def recorded_array(task: Task, array: Any, *, compiled: bool) -> RecordedStep:
    """The array's whole step."""
    batch = task.inputs, task.target
    return RecordedStep(array, array.optimizers[0], task.job.loss, *batch, autocast=task.dtype, compiled=compiled)


CPU_WAYS: dict[str, Callable[[Task, int], Made]] = {
    "serial_eager": serial_eager,
    "vmap": vmap,
    "fused": fused_eager,
    "fused_fastest": fused_fastest,
}
CUDA_WAYS: dict[str, Callable[[Task, int], Made]] = {
    "serial_eager": serial_eager,
    "serial_graph": serial_graph,
    "serial_compiled": serial_compiled,
    "streams": streams,
    "vmap": vmap,
    "vmap_compiled": vmap_compiled,
    "ours": ours,
}
ONE_MODEL = ("serial_eager", "serial_graph", "serial_compiled")
"""Ways whose speed does not depend on how many models there are."""
SEPARATE = ("streams",)
"""Ways that hold B separate models: tried with few."""
