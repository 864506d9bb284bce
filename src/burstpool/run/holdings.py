"""Holdings: which parameters and buffers each device keeps, and with whom it adds up their gradients.

A device keeps what the blocks it runs use, and nothing else. What no block uses (it has no gradient either) stays with
the first device that has anything to do, so that a checkpoint holds the whole model. Takes the plan, the blocks and
the user's model; decides the same on every rank.

A parameter that several blocks use is kept by all devices that run any of them. Where all these blocks have the same
devices, its gradient is reduced with the first of them, whose backward comes last. Else it is reduced on its own,
among all devices that keep it, after each one's last backward of any of these blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from burstpool.model.block import Block
from burstpool.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Who keeps what. Keys are those of the user's state dict; of several names for one tensor, the traced one."""

    devices: Mapping[str, tuple[int, ...]]
    """Key → devices that keep it, ascending. Parameters, in the model's order, then buffers."""
    block: Mapping[str, str]
    """Key of a trainable parameter → the block with which it is reduced and stepped: the first that uses it."""
    blocks: Mapping[str, tuple[str, ...]]
    """Key of a trainable parameter → all blocks that use it, in the plan's order."""
    shared: Mapping[tuple[int, ...], tuple[str, ...]]
    """Devices → keys of trainable parameters that blocks on different devices share among exactly these."""
    aliases: Mapping[str, str]
    """Other names for a tensor in the user's state dict → the key under which it is kept."""

    def of(self, device: int) -> list[str]:
        """Keys that a device keeps."""
        return [key for key, devices in self.devices.items() if device in devices]

    def trainers(self) -> tuple[int, ...]:
        """Devices that keep any trainable parameter, ascending."""
        return tuple(sorted({device for key in self.block for device in self.devices[key]}))

    def counted_by(self, key: str) -> int:
        """The one device that counts a parameter in sums over the whole model."""
        return self.devices[key][0]


def find_holdings(plan: Plan, blocks: Mapping[str, Block], model: nn.Module) -> Holdings:
    """`blocks` are the plan's, by name."""
    users: dict[str, list[str]] = {}
    for planned in plan.blocks:
        for key in blocks[planned.name].state:
            users.setdefault(key, []).append(planned.name)
    members = {block.name: tuple(sorted(block.devices)) for block in plan.blocks}
    parameters, aliases = _names(model, users)
    devices = {
        key: tuple(sorted({device for name in users.get(key, ()) for device in members[name]})) or plan.devices[:1]
        for key in [*parameters, *dict(model.named_buffers())]
    }
    trained = {key: users[key] for key, parameter in parameters.items() if parameter.requires_grad and key in users}
    apart = {key for key, names in trained.items() if len({members[name] for name in names}) > 1}
    shared: dict[tuple[int, ...], list[str]] = {}
    for key in trained:
        if key in apart:
            shared.setdefault(devices[key], []).append(key)
    return Holdings(
        devices=devices,
        block={key: names[0] for key, names in trained.items()},
        blocks={key: tuple(names) for key, names in trained.items()},
        shared={who: tuple(keys) for who, keys in shared.items()},
        aliases=aliases,
    )


def keep_only(model: nn.Module, keys: Sequence[str], device: torch.device) -> None:
    """Moves these tensors to the device and frees all others; parameters stay the same objects."""
    kept = {id(_tensor(model, key)) for key in keys}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in kept:
                parameter.data = parameter.data.to(device)
            elif not parameter.is_meta:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device if id(buffer) in kept else "meta")
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN would copy weights that do not lie together at every call


def state_tensors(model: nn.Module, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tensors behind these keys."""
    return {key: _tensor(model, key) for key in keys}


def _tensor(model: nn.Module, key: str) -> torch.Tensor:
    owner, _, leaf = key.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)  # type: ignore[no-any-return]


def _names(model: nn.Module, users: Mapping[str, Sequence[str]]) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Each parameter under the one name by which the blocks know it, and the other names it has."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    kept, aliases = {}, {}
    for identity, known_as in names.items():
        key = next((name for name in known_as if name in users), known_as[0])
        kept[key] = tensors[identity]
        aliases.update({name: key for name in known_as if name != key})
    return kept, aliases
