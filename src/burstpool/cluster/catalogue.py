"""The catalogue: what known devices and links can do at best.

Decides nothing; reads `catalogue.toml`, which says where each figure comes from. Takes a name as a person
writes it or a driver reports it, returns a `DeviceType` or a `Link`. The figures are peaks: what a layer
reaches is measured, elsewhere.
"""

import difflib
import functools
import importlib.resources
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pydantic

from burstpool.artifact import STRICT
from burstpool.errors import ClusterError

DType = Literal["fp64", "fp32", "tf32", "fp16", "bf16"]
"""How rates are named: by the type of the operands."""
DTYPES: tuple[DType, ...] = get_args(DType)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """What one kind of device can do."""

    __pydantic_config__ = STRICT

    name: str
    """As cluster files write it; upper and lower case are the same."""
    memory_bytes: int
    """The device's own memory."""
    memory_bytes_per_s: float
    """Peak rate of that memory, reads and writes together."""
    flops_per_s: Mapping[DType, float] = field(hash=False)
    """Dense peak rates. A missing key: the device lacks that type, or nobody could confirm the figure."""
    multiprocessors: int | None = None
    """Streaming multiprocessors, where known."""
    host_step_s: float = 0.0
    """What a step of training takes of the host besides its layers, loading and update; 0 where it hides."""
    host_block_s: float = 0.0
    """The same of every block that a device runs in a step."""
    source: str
    """Where the figures come from."""

    def __post_init__(self) -> None:
        check_line("name", self.name)
        check_line("source", self.source)
        check_rates(self)
        if not self.flops_per_s:
            raise ValueError(f"flops_per_s of {self.name!r} is empty; give at least fp32")

    def peak_flops_per_s(self, dtype: DType) -> float:
        """The rate for one type of operands; says which there are where this one is missing."""
        if dtype not in self.flops_per_s:
            known = ", ".join(self.flops_per_s)
            raise ClusterError(f"no {dtype} rate is known for device type {self.name!r}; known: {known}")
        return self.flops_per_s[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How bytes get from one place to another: a message of n bytes takes latency_s + n / bytes_per_s."""

    __pydantic_config__ = STRICT

    bytes_per_s: float
    """One direction; both directions at once are assumed not to slow each other."""
    latency_s: float
    """Of one message, however small, software included."""
    shares_compute: bool = False
    """Whether what computes also moves the bytes, as a CPU worker's core does: communication then takes its time from
    compute instead of hiding behind it."""
    send_s: float = 0.0
    """Where they share: how long a message, however small, keeps its sender from computing."""
    reduce_s: Mapping[int, Mapping[int, float]] = field(default_factory=dict, hash=False)
    """Devices → bytes → seconds by which a reduction was seen to lengthen a step; where it was not measured it is
    worked out from rate and latency."""
    source: str = ""
    """The preset's name, or how it was measured."""

    def __post_init__(self) -> None:
        _check_positive("bytes_per_s", self.bytes_per_s)
        if not 0 <= self.latency_s < 1e6:  # false of NaN, too
            raise ValueError(f"latency_s={self.latency_s} must be 0 or more and less than a million")
        if not 0 <= self.send_s < 1e6:
            raise ValueError(f"send_s={self.send_s} must be 0 or more and less than a million")
        for members, table in self.reduce_s.items():
            if members < 2 or len(table) < 2:
                raise ValueError(f"reduce_s of {members} devices needs two devices and two sizes or more")
            for num_bytes, seconds in table.items():
                if num_bytes < 0 or not 0 <= seconds < 1e6:
                    raise ValueError(f"reduce_s of {members} devices, {num_bytes} bytes, is {seconds}; give 0 or more")
        if self.source:
            check_line("source", self.source)

    def __str__(self) -> str:
        return f"{in_units(self.bytes_per_s, 'B/s')}, {in_units(self.latency_s, 's')}"


def names() -> tuple[str, ...]:
    """All device types, in the catalogue's order: oldest first, the CPU last."""
    return tuple(device_type.name for device_type in _catalogue().device_types)


def device_type(name: str) -> DeviceType:
    """The entry of that name, whatever its case."""
    found = _catalogue().by_name.get(name.casefold())
    if found is None:
        raise ClusterError(f"device type {name!r} is not in the catalogue{_close(name, names())}")
    return found


def match(reported_name: str) -> str | None:
    """The catalogue's name for what `torch.cuda.get_device_name` reports, or None for a device it lacks.

    Variants of a listed device with other figures (PCIe boards, MIG slices) give None too: measure those.
    """
    return _catalogue().by_reported_name.get(_without_brand(reported_name))


def link_names() -> tuple[str, ...]:
    """All link presets."""
    return tuple(_catalogue().links)


def link(name: str) -> Link:
    """The preset of that name, whatever its case."""
    found = _catalogue().links.get(name.casefold())
    if found is None:
        raise ClusterError(f"there is no link preset {name!r}{_close(name, link_names())}")
    return Link(bytes_per_s=found.bytes_per_s, latency_s=found.latency_s, source=name.casefold())


def link_source(name: str) -> str:
    """Where a preset's figures come from."""
    link(name)
    return _catalogue().links[name.casefold()].source


def check_rates(figures: Any) -> None:
    """Refuses figures that no device has; fields that are None or absent are not looked at.

    Takes anything with the fields of a `DeviceType`: a cluster file's corrections obey the same rules.
    """
    if figures.memory_bytes is not None:
        _check_positive("memory_bytes", figures.memory_bytes)
    if figures.memory_bytes_per_s is not None:
        _check_positive("memory_bytes_per_s", figures.memory_bytes_per_s)
    for name in ("host_step_s", "host_block_s"):
        seconds = getattr(figures, name)
        if seconds is not None and not 0 <= seconds < 1e6:  # false of NaN, too
            raise ValueError(f"{name}={seconds} must be 0 or more and less than a million")
    if figures.multiprocessors is not None and figures.multiprocessors < 1:
        raise ValueError(f"multiprocessors={figures.multiprocessors} must be at least 1")
    for key, rate in figures.flops_per_s.items():
        if key not in DTYPES:
            raise ValueError(f"flops_per_s has key {key!r}; expected one of {', '.join(DTYPES)}")
        _check_positive(f"flops_per_s.{key}", rate)


def in_units(value: float, unit: str) -> str:
    """A quantity as people write it: 3e11 B/s is `300 GB/s`, 1.2e-5 s is `12 µs`."""
    for factor, prefix in (
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1, ""),
        (1e-3, "m"),
        (1e-6, "µ"),
    ):
        if abs(value) >= factor * 0.9995:  # 999.9 would be written 1e+03
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value / 1e-9:.3g} n{unit}" if value else f"0 {unit}"


@dataclass(frozen=True, kw_only=True)
class _Catalogue:
    """The file, and indices into it."""

    __pydantic_config__ = STRICT

    device_types: tuple[DeviceType, ...]
    reported_names: dict[str, str]
    links: dict[str, Link]

    @functools.cached_property
    def by_name(self) -> dict[str, DeviceType]:
        return {device_type.name.casefold(): device_type for device_type in self.device_types}

    @functools.cached_property
    def by_reported_name(self) -> dict[str, str]:
        return {_without_brand(reported): name for reported, name in self.reported_names.items()}


@functools.cache
def _catalogue() -> _Catalogue:
    text = importlib.resources.files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8")
    return pydantic.TypeAdapter(_Catalogue).validate_python(tomllib.loads(text))


def _without_brand(reported_name: str) -> str:
    """`NVIDIA A100-SXM4-80GB` → `a100-sxm4-80gb`: drivers put the brand in front or leave it out."""
    return re.sub(r"^((nvidia|tesla|geforce) +)+", "", " ".join(reported_name.split()).casefold())


def _close(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'A100' or 'A100-80GB'?)`, or the whole list where nothing is close."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    folded = name.casefold()
    near = [candidate for candidate in by_folded if folded and folded in candidate]
    near += [one for one in difflib.get_close_matches(folded, by_folded, n=3) if one not in near]
    if not near:
        return f" (it has {', '.join(by_folded.values())})"
    return f" (did you mean {' or '.join(repr(by_folded[candidate]) for candidate in near[:3])}?)"


def _check_positive(what: str, value: float) -> None:
    if not 0 < value < 1e24:  # false of NaN, too
        raise ValueError(f"{what}={value} must be more than 0 and less than 1e24")


def check_line(what: str, text: str) -> None:
    """Refuses names and sources that would not fit on one line of a file or a table."""
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{what}={text!r} must be one line of printable text")
