"""Export: a checkpoint's weights as one safetensors file with the user's own keys.

Needs no workers and no job: `model.load_state_dict(safetensors.torch.load_file(path))` is all a user has to do.
"""

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from burstpool.errors import RunError
from burstpool.run.checkpoint import CheckpointState, fill, read_metadata


def load_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The user's state dict, tied tensors under each of their names."""
    state = CheckpointState.load(checkpoint / "state.json")
    reader = FileSystemReader(checkpoint)
    stored = read_metadata(reader).state_dict_metadata
    wanted: dict[str, Any] = {}
    for key in state.persistent:
        info = stored[f"model.{key}"]
        assert isinstance(info, TensorStorageMetadata)
        wanted[f"model.{key}"] = torch.empty(info.size, dtype=info.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
        fill(wanted, reader, control=None)
    weights = {key: wanted[f"model.{key}"] for key in state.persistent}
    return weights | {alias: weights[key].clone() for alias, key in state.aliases.items()}


def export_weights(checkpoint: Path, path: Path) -> Path:
    """Writes the file whole or not at all."""
    return write_weights(load_weights(checkpoint), path)


def write_weights(state: Mapping[str, Any], path: Path) -> Path:
    """The tensors of a state dict, wherever and however they lie, as a safetensors file, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    aside = path.with_name(f".{path.name}.part")
    try:
        save_file(_apart(state), aside)
        aside.chmod(0o644)  # safetensors' 0600 would hide the file from the user's group
        aside.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error}") from None
    return path


def _apart(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors in rows, on the host, none sharing memory with another; what a module keeps besides is left out."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        tensor = value.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        found[key] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found
