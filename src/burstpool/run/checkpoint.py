"""Checkpoints: the whole state of a run, written by all workers together, read back on any plan.

torch.distributed.checkpoint writes each tensor once, by the first device that keeps it, under the user's own names:

    model.KEY               parameters and buffers
    optimizer.KEY.NAME      what the optimizer remembers of a parameter
    group.KEY               the optimizer's hyper-parameters for it
    scheduler               the learning-rate schedule

and `state.json` holds the rest: step, place in the data, loss scale, other names of tied parameters. All random
numbers follow from seed and step, so none are stored. A checkpoint is written aside and renamed, so that one that can
be seen is whole. Because everything goes by the names of parameters, another plan on another number of devices can go
on from it.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from burstpool.artifact import STRICT, Artifact
from burstpool.errors import ArtifactError, RunError
from burstpool.run.holdings import Holdings, state_tensors
from burstpool.run.order import Position
from burstpool.run.update import LossScale, Update, hyper_parameters

_STATE = "state.json"
_PREFIX = "step-"
_COPIED_AHEAD_BYTES = 10_000_000
"""From a GPU, while others are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState(Artifact):
    """What a checkpoint says besides its tensors."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError

    schema_version: int = 1
    model: str
    """The class of the user's model."""
    step: int
    """Steps that are done."""
    position: Position
    """Where the next step's samples begin."""
    seed: int
    loss_scale: tuple[float, int] | None = None
    """With fp16: the factor, and good steps since it changed."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied tensors in the user's state dict → the key they are stored under."""
    persistent: tuple[str, ...] = ()
    """Keys of the user's state dict, tied names left out."""


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return folder / f"{_PREFIX}{step:08d}"


def all_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if (path / _STATE).is_file()]
    return sorted(found, key=lambda path: path.name)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    return next(reversed(all_checkpoints(folder)), None)


def save_checkpoint(
    folder: Path,
    state: CheckpointState,
    *,
    tensors: Mapping[str, torch.Tensor],
    update: Update,
    control: dist.ProcessGroup,
    keep: int,
) -> Path:
    """Writes one; every rank must call it, each with the tensors it keeps."""
    final = step_folder(folder, state.step)
    aside = folder / f".{final.name}.part"
    first = dist.get_rank(control) == 0
    if first:
        for left in folder.glob(f".{_PREFIX}*.part"):  # by a run that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier(control)
    flat = _flat(tensors, update)
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in flat.values())
    # Where nothing is copied ahead, no stream is made on a GPU that nobody uses, and so no context.
    ahead_bytes = _COPIED_AHEAD_BYTES if on_gpu else 0
    writer = FileSystemWriter(aside, thread_count=1, sync_files=True, per_thread_copy_ahead=ahead_bytes)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        save(flat, storage_writer=writer, planner=planner, process_group=control)
    except CheckpointException as error:
        if first:
            shutil.rmtree(aside, ignore_errors=True)
        raise RunError(f"checkpoint {final} cannot be written ({_cause(error)}); is the disk full?") from error
    if first:
        state.save(aside / _STATE)
        if final.exists():  # the same step again, after going on from an older one
            shutil.rmtree(final)
        aside.rename(final)
        for old in all_checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier(control)
    return final


def load_checkpoint(
    path: Path, *, tensors: Mapping[str, torch.Tensor], update: Update, control: dist.ProcessGroup
) -> CheckpointState:
    """Fills the tensors and the optimizer in place; every rank must call it, each with the tensors it keeps."""
    state = CheckpointState.load(path / _STATE)
    reader = FileSystemReader(path)
    metadata = read_metadata(reader)
    if lacking := [key for key in tensors if f"model.{key}" not in metadata.state_dict_metadata]:
        raise RunError(f"checkpoint {path} has no {lacking[0]!r}; it is of another model")
    wanted: dict[str, Any] = {f"model.{key}": tensor.detach() for key, tensor in tensors.items()}
    for key in update.parameters:
        wanted.update(_empty(metadata, f"optimizer.{key}."))
        wanted.update(_empty(metadata, f"group.{key}", exact=True))
    wanted.update(_empty(metadata, "scheduler", exact=True))
    _check_shapes(path, metadata, wanted)
    fill(wanted, reader, control=control)
    _restore(update, wanted)
    if update.scale is not None and state.loss_scale is not None:
        update.scale.factor, update.scale.good_steps = state.loss_scale
    return state


def read_metadata(reader: FileSystemReader) -> Metadata:
    """What a checkpoint holds."""
    try:
        return reader.read_metadata()
    except Exception as error:  # pickle raises anything for a file that is cut short
        raise RunError(_broken(reader.checkpoint_id, f"{type(error).__name__}: {error}")) from error


def fill(wanted: dict[str, Any], reader: FileSystemReader, *, control: dist.ProcessGroup | None) -> None:
    """Reads what is stored under these names into what is there; without a group, by this process alone."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load(wanted, storage_reader=reader, planner=planner, process_group=control, no_dist=control is None)
    except CheckpointException as error:  # no Exception: who catches those would be ended by it
        raise RunError(_broken(reader.checkpoint_id, _cause(error))) from error


def _broken(path: str | os.PathLike[str], why: str) -> str:
    return f"checkpoint {path} cannot be read ({why}); remove it to go on from the one before it"


def _cause(error: CheckpointException) -> str:
    """What the first of the workers raised; the exception's own text has all their tracebacks."""
    cause = next(iter(error.failures.values()))[0]
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def state_of(
    *, model: torch.nn.Module, holdings: Holdings, step: int, position: Position, seed: int, scale: LossScale | None
) -> CheckpointState:
    """What `state.json` says."""
    return CheckpointState(
        model=type(model).__name__,
        step=step,
        position=position,
        seed=seed,
        loss_scale=None if scale is None else (scale.factor, scale.good_steps),
        aliases=dict(holdings.aliases),
        persistent=tuple(key for key in model.state_dict(keep_vars=True) if key not in holdings.aliases),
    )


def held_tensors(model: torch.nn.Module, holdings: Holdings, device: int) -> dict[str, torch.Tensor]:
    """All that a device keeps of the model, by key."""
    return state_tensors(model, holdings.of(device))


def _flat(tensors: Mapping[str, torch.Tensor], update: Update) -> dict[str, Any]:
    found: dict[str, Any] = {f"model.{key}": tensor.detach() for key, tensor in tensors.items()}
    if update.optimizer is None:
        return found
    names = {id(parameter): key for key, parameter in update.parameters.items()}
    for group in update.optimizer.param_groups:
        for parameter in group["params"]:
            key = names[id(parameter)]
            found[f"group.{key}"] = hyper_parameters(group)
            remembered = update.optimizer.state.get(parameter, {})
            found.update({f"optimizer.{key}.{name}": value for name, value in remembered.items()})
    if update.scheduler is not None:
        found["scheduler"] = update.scheduler.state_dict()
    return found


def _empty(metadata: Metadata, start: str, *, exact: bool = False) -> dict[str, Any]:
    """Room for what is stored under these names."""
    return {
        key: torch.empty(info.size, dtype=info.properties.dtype) if isinstance(info, TensorStorageMetadata) else None
        for key, info in metadata.state_dict_metadata.items()
        if (key == start if exact else key.startswith(start))
    }


def _check_shapes(path: Path, metadata: Metadata, wanted: Mapping[str, Any]) -> None:
    for key, tensor in wanted.items():
        info = metadata.state_dict_metadata[key]
        if isinstance(tensor, torch.Tensor) and isinstance(info, TensorStorageMetadata) and info.size != tensor.shape:
            name = key.partition(".")[2]
            raise RunError(
                f"checkpoint {path} has {name!r} of shape {tuple(info.size)}, the model of {tuple(tensor.shape)}; "
                "pass the hyper-parameters it was trained with"
            )


def _restore(update: Update, loaded: Mapping[str, Any]) -> None:
    if update.optimizer is None:
        return
    names = {id(parameter): key for key, parameter in update.parameters.items()}
    current = update.optimizer.state_dict()
    remembered: dict[int, dict[str, Any]] = {}
    for group, described in zip(update.optimizer.param_groups, current["param_groups"], strict=True):
        for parameter, index in zip(group["params"], described["params"], strict=True):
            start = f"optimizer.{names[id(parameter)]}."
            found = {key.removeprefix(start): value for key, value in loaded.items() if key.startswith(start)}
            if found:
                remembered[index] = found
            described.update(loaded.get(f"group.{names[id(parameter)]}") or {})
    current["state"] = remembered
    update.optimizer.load_state_dict(current)
    update.keep_rates_on_device()
    if update.scheduler is not None and loaded.get("scheduler") is not None:
        update.scheduler.load_state_dict(loaded["scheduler"])
        # Another plan may have put other parameters into this device's groups.
        update.scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in update.optimizer.param_groups]
