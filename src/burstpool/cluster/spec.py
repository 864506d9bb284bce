"""ClusterSpec: the devices of a pool, the nodes they sit in and the links between them, as data.

Reads and writes `cluster.toml`. Says what planners ask: which devices there are, which link joins two of
them, what a device type can do. Two tiers only, inside a node and between nodes; racks, oversubscribed
switches and links that differ within a node are not described. Knows nothing of layers, jobs or clocks.
"""

import json
import os
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import pydantic

from burstpool.artifact import STRICT, Artifact, write_whole
from burstpool.cluster import catalogue
from burstpool.cluster.catalogue import DTYPES, DeviceType, DType, Link
from burstpool.errors import ArtifactError, ClusterError

MAX_DEVICES = 1_000_000
"""More than this is taken for a slip of the keyboard."""


def _read_link(value: Any) -> Any:
    """What a file may write for a link: a preset's name, or a table that may name one as its `preset`."""
    try:
        if isinstance(value, str):
            return catalogue.link(value)
        if isinstance(value, dict) and isinstance(value.get("preset"), str):
            base = catalogue.link(value["preset"])
            rest = {key: given for key, given in value.items() if key != "preset"}
            source = f"{base.source}, corrected"
            return {"bytes_per_s": base.bytes_per_s, "latency_s": base.latency_s, "source": source} | rest
    except ClusterError as error:
        raise ValueError(str(error)) from None
    return value


LinkField = Annotated[Link | None, pydantic.BeforeValidator(_read_link)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCount:
    """So many devices of one type, side by side in a node."""

    __pydantic_config__ = STRICT

    type: str
    """A name of the catalogue, or of the file's own `device_types`."""
    count: int = 1
    """How many of them a node has."""

    def __post_init__(self) -> None:
        catalogue.check_line("type of a device", self.type)
        if self.count < 1:
            raise ValueError(f'count={self.count} of device type "{self.type}" must be at least 1')


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that are alike."""

    __pydantic_config__ = STRICT

    name: str
    """How the table and errors call the group."""
    count: int = 1
    """How many such nodes there are."""
    devices: tuple[DeviceCount, ...]
    """The devices of one node, in the order of their local ranks."""
    link: LinkField = None
    """Inside a node: what each device can send, and at the same time receive, to and from its neighbours."""

    def __post_init__(self) -> None:
        catalogue.check_line("name of a node group", self.name)
        if self.count < 1:
            raise ValueError(f'count={self.count} of node group "{self.name}" must be at least 1')
        if not self.devices:
            raise ValueError(f'node group "{self.name}" has no devices; give devices = [{{type = "A100", count = 8}}]')
        if self.devices_per_node > 1 and self.link is None:
            raise ValueError(f'node group "{self.name}" has several devices a node and no link; give link = "nvlink3"')

    @property
    def devices_per_node(self) -> int:
        """Devices in one of its nodes."""
        return sum(devices.count for devices in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """A device type the catalogue lacks, or corrections to one it has, whose other figures then stay."""

    __pydantic_config__ = STRICT

    name: str
    """A name of the catalogue, to correct it; any other, to define a type."""
    memory_bytes: int | None = None
    """The device's own memory."""
    memory_bytes_per_s: float | None = None
    """Rate of that memory, reads and writes together."""
    flops_per_s: Mapping[DType, float] = field(default_factory=dict, hash=False)
    """Replaces the catalogue's rates of these types only."""
    multiprocessors: int | None = None
    """Streaming multiprocessors, where known."""
    host_step_s: float | None = None
    """What a step of training takes of the host besides its layers, loading and update."""
    host_block_s: float | None = None
    """The same of every block that a device runs in a step."""
    source: str = "cluster file"
    """Where the figures come from."""

    def __post_init__(self) -> None:
        catalogue.check_line("name of a device type", self.name)
        catalogue.check_line("source of a device type", self.source)
        catalogue.check_rates(self)

    def over(self, base: DeviceType | None) -> DeviceType:
        """These figures, and the catalogue's for what they leave out."""
        if base is None:
            needed = ("memory_bytes", "memory_bytes_per_s", "flops_per_s")
            missing = [what for what in needed if not getattr(self, what)]
            if missing:
                raise ValueError(f'device type "{self.name}" is not in the catalogue, so it needs {", ".join(missing)}')
        return DeviceType(
            name=base.name if base else self.name,
            memory_bytes=_first(self.memory_bytes, base and base.memory_bytes),
            memory_bytes_per_s=_first(self.memory_bytes_per_s, base and base.memory_bytes_per_s),
            flops_per_s={**(base.flops_per_s if base else {}), **self.flops_per_s},
            multiprocessors=_first(self.multiprocessors, base and base.multiprocessors),
            host_step_s=_first(self.host_step_s, base.host_step_s if base else 0.0),
            host_block_s=_first(self.host_block_s, base.host_block_s if base else 0.0),
            source=f"{self.source}; else {base.source}" if base else self.source,
        )


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the pool."""

    index: int
    """Its rank in the pool: nodes in the file's order, then the devices of a node."""
    type: str
    """The type's name, in the catalogue's spelling."""
    node: int
    """The index of the node it sits in."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the pool."""

    index: int
    """Nodes are counted in the file's order."""
    group: str
    """The name of its node group."""
    devices: tuple[Device, ...]
    """In the order of their local ranks."""
    link: Link | None
    """Between its devices; None in a node of one."""


class _Layout:
    """Room for what is worked out once from the fields; no part of the value: not compared, not pickled."""

    __slots__ = ("_nodes", "_ranked", "_types")

    _nodes: tuple[Node, ...]
    _ranked: tuple[Device, ...]
    _types: dict[str, DeviceType]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(_Layout, Artifact):
    """The whole pool. Immutable; every question below is answered in constant time after the first."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ClusterError

    schema_version: int = 1
    """The version of this file format."""
    name: str
    """How reports call the pool."""
    node_groups: tuple[NodeGroup, ...]
    """All nodes, those that are alike together."""
    network: LinkField = None
    """Between nodes: what each node can send, and at the same time receive; its devices share it."""
    device_types: tuple[DeviceFigures, ...] = ()
    """Device types of this pool's own, and corrections to the catalogue's."""

    def __post_init__(self) -> None:
        catalogue.check_line("name of a cluster", self.name)
        if not self.node_groups:
            raise ValueError("node_groups is empty; a cluster needs at least one node")
        _check_unique("node group", [group.name for group in self.node_groups])
        _check_unique("device type", [figures.name.casefold() for figures in self.device_types])
        if self.num_devices > MAX_DEVICES:
            raise ValueError(f"{self.num_devices} devices are more than {MAX_DEVICES}, the most a cluster can have")
        if self.num_nodes > 1 and self.network is None:
            raise ValueError(f'{self.num_nodes} nodes and no network; give network = "infiniband-hdr"')
        self._check_types()

    def _check_types(self) -> None:
        used = set()
        for group in self.node_groups:
            for devices in group.devices:
                used.add(devices.type.casefold())
                try:
                    self.device_type(devices.type)
                except ClusterError as error:
                    raise ValueError(f'type "{devices.type}" of node group "{group.name}": {error}') from None
        for figures in self.device_types:
            if figures.name.casefold() not in used:
                raise ValueError(f'device_types describes "{figures.name}", which no node group has; correct its name')

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(group.count * group.devices_per_node for group in self.node_groups)

    @property
    def num_nodes(self) -> int:
        """Nodes of all groups."""
        return sum(group.count for group in self.node_groups)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, by index."""
        if not hasattr(self, "_ranked"):
            ranked = tuple(device for node in self.nodes() for device in node.devices)
            object.__setattr__(self, "_ranked", ranked)
        return self._ranked

    def nodes(self) -> tuple[Node, ...]:
        """All nodes, by index."""
        if not hasattr(self, "_nodes"):
            object.__setattr__(self, "_nodes", self._lay_out())
        return self._nodes

    def _lay_out(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        num_ranked = 0
        for group in self.node_groups:
            types = [self.device_type(part.type).name for part in group.devices for _ in range(part.count)]
            for _ in range(group.count):
                devices = tuple(Device(num_ranked + i, name, len(nodes)) for i, name in enumerate(types))
                nodes.append(Node(len(nodes), group.name, devices, group.link))
                num_ranked += len(types)
        return tuple(nodes)

    @property
    def homogeneous(self) -> bool:
        """Whether all devices are of one type; nodes may still differ in size and links."""
        names = {self.device_type(part.type).name for group in self.node_groups for part in group.devices}
        return len(names) == 1

    def link(self, a: Device | int, b: Device | int) -> Link:
        """What joins two devices, given as devices or their indices."""
        first, second = self._device(a), self._device(b)
        if first.index == second.index:
            raise ClusterError(f"device {first.index} of {self.name!r} needs no link to itself")
        found = self.nodes()[first.node].link if first.node == second.node else self.network
        assert found is not None  # checked when the spec was made
        return found

    def _device(self, device: Device | int) -> Device:
        index = device.index if isinstance(device, Device) else device
        if not 0 <= index < self.num_devices:
            raise ClusterError(f"there is no device {index} in {self.name!r}; it has 0 to {self.num_devices - 1}")
        return self.devices[index]

    def device_type(self, name: str) -> DeviceType:
        """What a device type can do: the file's figures where it gives some, else the catalogue's."""
        if not hasattr(self, "_types"):
            object.__setattr__(self, "_types", {})
        if name not in self._types:
            self._types[name] = self._find_type(name)
        return self._types[name]

    def _find_type(self, name: str) -> DeviceType:
        own = {figures.name.casefold(): figures for figures in self.device_types}.get(name.casefold())
        try:
            base = catalogue.device_type(name)
        except ClusterError as error:
            if own is None:
                how = f"to define it, add [[device_types]] with name = {_toml(name)} and its figures"
                raise ClusterError(f"{error}; {how}") from None
            base = None
        return own.over(base) if own else base  # type: ignore[return-value]  # one of the two is there

    @classmethod
    def uniform(
        cls,
        device_type: str,
        *,
        devices_per_node: int,
        num_nodes: int = 1,
        link: Link | str | None = None,
        network: Link | str | None = None,
        name: str = "",
    ) -> Self:
        """Nodes that are all alike, with links given as themselves or as presets' names."""
        group = NodeGroup(
            name="all",
            count=num_nodes,
            devices=(DeviceCount(type=device_type, count=devices_per_node),),
            link=_read_link(link),
        )
        name = name or f"{num_nodes}x{devices_per_node} {device_type}"
        return cls(name=name, node_groups=(group,), network=_read_link(network))

    def describe(self) -> str:
        """A few lines for a person."""
        lines = [f"{self.name}: {plural(self.num_devices, 'device')} in {plural(self.num_nodes, 'node')}"]
        for group in self.node_groups:
            inside = f", inside {group.link}" if group.link else ""
            lines.append(f"  {group.name}: {plural(group.count, 'node')} of {describe_devices(group)}{inside}")
        if self.network:
            lines.append(f"  between nodes: {self.network}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def to_toml(self) -> str:
        """The file a person would write: the same text for equal clusters."""
        lines = [f"schema_version = {self.schema_version}", f"name = {_toml(self.name)}"]
        if self.network:
            lines.append(f"network = {_toml(_link_table(self.network))}")
        for group in self.node_groups:
            lines += ["", "[[node_groups]]", f"name = {_toml(group.name)}", f"count = {group.count}"]
            parts = [{"type": part.type, "count": part.count} for part in group.devices]
            lines.append(f"devices = {_toml(parts)}")
            if group.link:
                lines.append(f"link = {_toml(_link_table(group.link))}")
        for figures in self.device_types:
            lines += ["", "[[device_types]]"]
            lines += [f"{key} = {_toml(value)}" for key, value in _figures_table(figures).items()]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str | bytes, *, source: str = "this TOML") -> Self:
        """Reads a cluster file's text; `source` names it in errors."""
        try:
            data = tomllib.loads(text.decode() if isinstance(text, bytes) else text)
            # By way of JSON, so that both kinds of file pass the same checks of version and fields.
            as_json = json.dumps(data, default=str)
        except (ValueError, RecursionError) as error:  # also text that is not UTF-8, numbers of 4301 digits
            raise ClusterError(f"{source} is not whole TOML ({error}); was it cut short?") from None
        return cls.from_json(as_json, source=source)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes TOML where the path ends in `.toml`, else JSON; whole or not at all."""
        return write_whole(path, self.to_toml() if Path(path).suffix == ".toml" else self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads JSON where the path ends in `.json`, else TOML."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ClusterError(f"cannot read {path}: {error.strerror}") from None
        read = cls.from_json if Path(path).suffix == ".json" else cls.from_toml
        return read(text, source=str(path))


def describe_devices(group: NodeGroup) -> str:
    """The devices of one node: `2 × A100 + 4 × T4`."""
    return " + ".join(f"{devices.count} × {devices.type}" for devices in group.devices)


def plural(number: int, noun: str) -> str:
    """`1 node`, `4 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _check_unique(what: str, names: list[str]) -> None:
    name, times = Counter(names).most_common(1)[0] if names else ("", 1)
    if times > 1:
        raise ValueError(f'{what} "{name}" is described {times} times; names must be unique')


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _link_table(link: Link) -> dict[str, Any]:
    table: dict[str, Any] = {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
    if link.shares_compute:
        table["shares_compute"] = True
    if link.send_s:
        table["send_s"] = link.send_s
    if link.reduce_s:
        table["reduce_s"] = {
            str(n): {str(b): s for b, s in sorted(t.items())} for n, t in sorted(link.reduce_s.items())
        }
    return table | ({"source": link.source} if link.source else {})


def _figures_table(figures: DeviceFigures) -> dict[str, Any]:
    rates = ("memory_bytes", "memory_bytes_per_s", "flops_per_s", "multiprocessors", "host_step_s", "host_block_s")
    table = {key: getattr(figures, key) for key in ("name", *rates, "source")}
    return {key: value for key, value in table.items() if value is not None and value != {}}


def _toml(value: Any) -> str:
    """One value, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        keys = sorted(value, key=DTYPES.index) if set(value) <= set(DTYPES) else value
        return f"{{ {', '.join(f'{key} = {_toml(value[key])}' for key in keys)} }}"
    if isinstance(value, float) and abs(value) >= 1e6:
        return f"{Decimal(repr(value)).normalize():e}"  # 3e+11 and not 300000000000.0; the same number exactly
    # JSON's numbers and strings are TOML's too, but for what `isprintable` keeps out of the strings.
    return json.dumps(value, ensure_ascii=False)
