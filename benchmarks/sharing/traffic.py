"""Operations and bytes of a job's training step, counted operator by operator, without running it.

Takes a job as cuda.py names it (`vgg16:4`, `array:16`). Returns a `StepWork`: the forward and the backward in bf16
autocast over fp32 weights and the optimizer's step, gone through with tensors that have shapes and no data. Every
operator reads its inputs and writes its outputs, as kernels that are started one by one do: casts of the weights and
the passes of the optimizer over them count as often as they are made. What the GPU's cache holds is not read again,
and not written to memory before it is pushed out, or ever if it is freed before; of all that lies in the cache the
least recently used goes first.

Ignores what libraries do inside of an operator (workspaces, other layouts) and kernels that touch a tensor twice, both
of which make the bytes more; and that operators on a CPU's tensors, which stand in for the GPU's, are in places others
(dropout, layer norms in bf16).
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from prediction import ARRAY_MEMBERS, ARRAY_SETTINGS, UPDATE_PASSES
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from burstpool.job import Job, load_job, model_arguments

CACHE_BYTES = 50_000_000
"""The second-level cache of an H100, whose chip an H200 has, 60 MB in full (chipsandcheese.com/2023/07/02)."""
_MOVES_NOTHING = ("empty", "new_empty", "_unsafe_view")
_SETS = {"copy_", "fill_", "zero_", "bernoulli_"}
"""Operators that write a tensor without reading it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one training step asks of a GPU."""

    operations: float
    """Of matrix products and convolutions, a multiply-add counted as two."""
    memory_bytes: float
    """To and from memory."""
    parameter_bytes: int
    """Of the weights, in fp32."""

    def times(self, members: int) -> "StepWork":
        """So many of them at once, as in a fused array."""
        return StepWork(
            operations=members * self.operations,
            memory_bytes=members * self.memory_bytes,
            parameter_bytes=members * self.parameter_bytes,
        )


@cache
def step_work(which: str, cache_bytes: int = CACHE_BYTES) -> StepWork:
    """Of a job as cuda.py names it."""
    name, batch = which.split(":")
    if name != "array":
        return counted(replace(load_job(f"zoo:{name}"), batch=int(batch)), cache_bytes)
    one = replace(load_job("zoo:resnet18", ARRAY_SETTINGS), batch=int(batch))
    # The members' operators are one, on tensors as large as all of theirs: each has its part of the cache.
    found = counted(one, cache_bytes // ARRAY_MEMBERS, with_update=False)
    # An array's update is one kernel.
    return replace(found, memory_bytes=found.memory_bytes + UPDATE_PASSES * found.parameter_bytes).times(ARRAY_MEMBERS)


def counted(job: Job, cache_bytes: int, *, with_update: bool = True) -> StepWork:
    """The second of two steps: in the first one the optimizer has no state yet."""
    inputs, target = job.samples(job.batch)
    model = job.build_model().train()  # outside: how weights are drawn may depend on their values
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        parameters = {name: fake.from_tensor(parameter) for name, parameter in model.named_parameters()}
        buffers = {name: fake.from_tensor(buffer) for name, buffer in model.named_buffers()}
        inputs, target = pytree.tree_map_only(torch.Tensor, fake.from_tensor, (inputs, target))
        arguments, keywords = model_arguments(inputs)
        optimizer = job.optimizer(parameters.values())
        for group in optimizer.param_groups:
            group["foreach"] = True  # torch's choice on a GPU

        def step(*, update: bool) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = functional_call(model, parameters | buffers, arguments, keywords)
                loss = job.loss(output, target)
            loss.backward()
            if update:
                optimizer.step()
            optimizer.zero_grad()

        step(update=True)
        with FlopCounterMode(display=False) as flops, _Traffic(cache_bytes) as traffic:
            step(update=with_update)
            traffic.memory.flush()
    return StepWork(
        operations=flops.get_total_flops(),
        memory_bytes=traffic.memory.moved_bytes,
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
    )


class _Memory:
    """Memory behind a cache that forgets what was used longest ago, tensor by tensor."""

    def __init__(self, cache_bytes: int) -> None:
        self.moved_bytes = 0
        self._room = cache_bytes
        self._held: OrderedDict[StorageWeakRef, tuple[int, bool]] = OrderedDict()
        """Storage → its bytes, and whether memory lacks what was written to it."""

    def touch(self, where: StorageWeakRef, size: int, *, read: bool = False, written: bool = False) -> None:
        """A kernel goes over a tensor."""
        held, was_written = self._held.pop(where, (0, False))
        self._room += held
        if read:
            self.moved_bytes += max(size - held, 0)
        self._held[where] = (max(size, held), written or was_written)
        self._room -= max(size, held)
        while self._room < 0:
            self._push_out()

    def flush(self) -> None:
        """The next step finds nothing of this one's."""
        while self._held:
            self._push_out()

    def _push_out(self) -> None:
        where, (size, written) = self._held.popitem(last=False)
        self._room += size
        if written and not where.expired():  # what nobody needs any more is overwritten in the cache
            self.moved_bytes += size


class _Traffic(TorchDispatchMode):
    """Sees every operator."""

    def __init__(self, cache_bytes: int) -> None:
        super().__init__()
        self.memory = _Memory(cache_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name, schema = func.overloadpacket.__name__, func._schema
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if func.namespace != "aten" or is_view or name.startswith(_MOVES_NOTHING):
            return found
        given = dict(zip((one.name for one in schema.arguments), args, strict=False)) | (kwargs or {})
        changed = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        written = _storages([given[argument] for argument in changed if argument in given] or found)
        for where, size in _storages(given).items():
            self.memory.touch(where, size, read=where not in written or name not in _SETS)
        for where, size in written.items():
            self.memory.touch(where, size, written=True)
        return found


def _storages(values: Any) -> dict[StorageWeakRef, int]:
    """Where tensors lie → the bytes that are gone over, once even where a tensor is given twice."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    # An expanded tensor is larger than what it lies in.
    return {StorageWeakRef(x): min(tensor.nbytes, x.nbytes()) for tensor, x in zip(tensors, storages, strict=True)}
