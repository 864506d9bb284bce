"""What a training step of B models takes of the memory: ours, B separate models with a graph each, HFTA's array.

A process of `largest.py` answers one request a line, by one line:

    {"workload": "resnet18", "way": "ours", "members": 64, "runs": 1}
    {"peak_bytes": …, "seconds": …} or {"error": …, "by_memory": …}

An array of any size is made of two fused models, by taking the first again and again: its tensors are those of an
array of as many copies, but no graph is captured again, no module copied. What building takes the usual way, where
models and array are alive at the same time, is counted by their sizes: `build_bytes`.

The peak is of the memory that torch's allocator hands out (`ours`, `hfta`: while the step is warmed up, recorded and
replayed), for separate models of what it holds, as each graph keeps its own. The last of `runs` counts: in the first
one, libraries try out kernels, some of which take much memory and are not chosen; cuDNN tries its first choice only.
What CUDA itself holds for a graph is not counted, and what the allocator cannot use for its pieces shows only where a
size is tried.

On the CPU memory is pretended: `PretendedMemory` counts the bytes of living tensors that operators return, and fails
as a GPU would. Scratch space within an operator is not seen there.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import hfta_code
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from ways import fused_array, one_step, recorded, recorded_array
from workloads import Task, task

from burstpool.fusion.array import FusedArray
from burstpool.fusion.streams import Streams

_LEFT = 0.005
"""Share of the GPU that a process may hold after a request and be asked again."""


class PretendedMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are alive; more than `limit_bytes` of them are as out of memory as on a GPU."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes, self.held_bytes, self.peak_bytes = limit_bytes, 0, 0
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Takes tensors in; those that share memory are counted once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type != "cpu" or storage in self._known:
                continue
            self._known[storage] = True
            self.held_bytes += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self.held_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"{self.held_bytes:,} bytes are held, {self.limit_bytes:,} are pretended")

    def _freed(self, count: int) -> None:
        self.held_bytes -= count


def grown(array: FusedArray, members: int) -> FusedArray:
    """An array of `members` times the first of two, which lose their random streams to it."""
    made = array._taken([0] * members)
    made.streams = Streams(range(members), array.device)
    return made


def ours(task: Task, members: int, memory: AbstractContextManager[Any]) -> dict[str, Any]:
    """Our array's step, operators by the rules' own choice, recorded where there is a GPU, and replayed twice."""
    base = [fused_array(task, 2, "rules")]
    with memory:
        array = grown(base.pop(), members)
        step = recorded_array(task, array, compiled=False)
        check_alike(step(task.inputs, task.target))
        losses = step(task.inputs, task.target)
        state = sum(tensor.nbytes for tensor in array.state.tensors.values())
        found = {"build_bytes": 2 * state, "peak_bytes": peak_bytes(memory)}
        return found | {"second_losses": [round(float(x), 4) for x in (losses.min(), losses.median(), losses.max())]}


def check_alike(losses: Tensor) -> None:
    """Members began alike, so that only dropout tells them apart: some operators fail in silence on huge tensors."""
    usual = losses.float().median()
    if not bool(((losses.float() - usual).abs() <= 0.5 * usual.abs() + 0.1).all()):
        raise ArithmeticError(f"members' losses differ: {losses.min():.3g} to {losses.max():.3g}")


def separate(task: Task, members: int, memory: AbstractContextManager[Any]) -> dict[str, Any]:
    """So many models, each with its optimizer and, where there is a GPU, its recorded step."""
    with memory:
        steps = [one_step(task, model) for model in task.models(members)]
        if task.device.type == "cuda":
            steps = [recorded(step) for step in steps]
        for step in steps:
            step()
        if task.device.type == "cpu":
            return {"peak_bytes": peak_bytes(memory)}
        give_back()
        return {"peak_bytes": torch.cuda.memory_reserved()}


_FILLING = {"uniform_", "normal_", "kaiming_uniform_", "kaiming_normal_", "_no_grad_uniform_", "erfinv_"}
"""Methods of tensors and functions of torch.nn.init."""


class Unfilled(TorchFunctionMode):
    """New weights stay as they come: drawing billions of random numbers on the host takes minutes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in _FILLING:
            return args[0] if args else given["tensor"]  # torch.nn.init's pass it by name
        return func(*args, **given)


def hfta(task: Task, members: int, memory: AbstractContextManager[Any]) -> dict[str, Any]:
    """HFTA's array as its examples run: no graph, so no more memory than it needs."""
    if not hfta_code.known(task.name):
        raise LookupError("HFTA has no such model")
    with memory:
        with Unfilled():
            step, _ = hfta_code.hfta_eager(task, members)()
        for _ in range(2):
            step()
        return {"peak_bytes": peak_bytes(memory)}


WAYS: dict[str, Callable[[Task, int, AbstractContextManager[Any]], dict[str, Any]]] = {
    "ours": ours,
    "separate": separate,
    "hfta": hfta,
}


def peak_bytes(memory: AbstractContextManager[Any]) -> int:
    """Of the pretended memory, or of the GPU since it was last given back."""
    if isinstance(memory, PretendedMemory):
        return memory.peak_bytes
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def give_back() -> None:
    """All that nobody uses any more goes back to the GPU; peaks are counted anew."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that was ever used
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def answer(request: dict[str, Any], options: argparse.Namespace, tasks: dict[str, Task]) -> dict[str, Any]:
    """What one request comes to; the memory is as before afterwards."""
    begun, name = time.monotonic(), request["workload"]
    try:
        if name not in tasks:
            tasks[name] = task(name, torch.device(options.device), torch.bfloat16 if options.dtype == "bf16" else None)
        if request["way"] == "limit":
            return {"limit_bytes": limit_bytes(options), "device": device_name(options)}
        memory = PretendedMemory(options.limit_bytes) if options.device == "cpu" else nullcontext()
        for _ in range(request["runs"]):
            give_back()
            found = WAYS[request["way"]](tasks[name], request["members"], memory)
    except Exception as error:  # a size that does not run is what is looked for
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]}
        found["by_memory"] = ran_out(error)
    try:
        give_back()
        if options.device == "cuda" and torch.cuda.memory_reserved() > _LEFT * torch.cuda.mem_get_info()[1]:
            found["broken"] = f"{torch.cuda.memory_reserved():,} bytes do not come back"
    except Exception as error:  # after some errors CUDA answers nothing any more
        found["broken"] = type(error).__name__
    return found | {"seconds": round(time.monotonic() - begun, 2)}


def limit_bytes(options: argparse.Namespace) -> int:
    """What there is for this process."""
    if options.device == "cpu":
        return int(options.limit_bytes)
    give_back()
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def device_name(options: argparse.Namespace) -> str:
    """As its maker has it."""
    return torch.cuda.get_device_name() if options.device == "cuda" else "cpu, its memory pretended"


def ran_out(error: Exception) -> bool:
    """Whether memory is what was missing; libraries say so in their own words."""
    text = str(error)
    words = ("out of memory", "ALLOC_FAILED", "memory allocation")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in text for word in words)


def serve(options: argparse.Namespace) -> None:
    """Answers requests until there are no more. Nothing touches the GPU before the first."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark_limit = 1  # to try ten kernels for each huge convolution takes minutes
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints, HFTA's code or a library, does not do it among the answers
    if options.hfta:
        hfta_code.add_path(Path(options.hfta))
    tasks: dict[str, Task] = {}
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), options, tasks)), file=output, flush=True)
