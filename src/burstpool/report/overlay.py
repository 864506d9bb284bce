"""One step of the predicted and of the measured timeline, laid over each other: what is drawn, in seconds.

Takes one Timeline or both. Chooses the step to show (the one whose length is nearest to the median), the devices (all,
or some of each kind of work where they are many) and how fine (short events are put together where they are many).
Each step begins at 0. Pure; `draw_timeline.py` makes a picture of it.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from burstpool.report.timeline import Event, Lane, Timeline

MOST_DEVICES = 64
"""More are not told apart on a page."""
SHOWN_OF_MANY = 24
"""How many are shown where they are more."""
MOST_BARS = 20_000
"""A browser draws these without delay."""
LANES: tuple[Lane, ...] = ("compute", "communication", "background")
_MOST_TRACKS = 3
_FINEST = 4096
"""Into this many parts a step is cut at first, where short events are put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """An event, or several short ones together."""

    kind: str
    """Of several: the kind that took longest."""
    block: str
    """Of several: the first."""
    start_s: float
    """Since the step began."""
    stop_s: float
    minibatch: int = 0
    count: int = 1
    """Events in it."""
    track: int = 0
    """Events of a strip that overlap lie on different tracks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """What one device did in one lane, predicted or measured."""

    lane: Lane
    source: str
    num_tracks: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One device."""

    device: int
    utilisation: Mapping[str, float]
    """Source → share of the time in which it computes."""
    strips: tuple[Strip, ...]
    """By lane, then source; those in which any device does anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """All there is to draw."""

    sources: tuple[str, ...]
    """`predicted`, `measured`, or both."""
    steps: Mapping[str, int]
    """Source → the step that is shown."""
    step_times_s: Mapping[str, float]
    """Source → seconds of a step in steady state."""
    length_s: float
    """What the time axis must hold."""
    rows: tuple[Row, ...]
    num_devices: int
    """Those that are not shown included."""
    kinds: tuple[str, ...]
    """In the order in which they first appear."""
    num_merged: int
    """Events that were put together with others."""


def overlay(timelines: Sequence[Timeline], *, most_bars: int = MOST_BARS) -> Overlay | None:
    """The timelines laid over each other; None where nothing happens in any."""
    timelines = [timeline for timeline in timelines if timeline.events]
    if not timelines:
        return None
    chosen: dict[str, int] = {timeline.source: shown_step(timeline) for timeline in timelines}
    events: dict[str, list[Event]] = {
        timeline.source: _from_zero(timeline, chosen[timeline.source]) for timeline in timelines
    }
    num_devices = max(timeline.num_devices for timeline in timelines)
    devices = shown_devices(events.values(), num_devices)
    ends_s = [event.stop_s for of_source in events.values() for event in of_source]
    length_s = max([*ends_s, *(timeline.step_time_s for timeline in timelines)])
    merged, num_merged = _bounded(_strips(events, devices), most_bars, length_s)
    return Overlay(
        sources=tuple(events),
        steps=chosen,
        step_times_s={timeline.source: timeline.step_time_s for timeline in timelines},
        length_s=length_s,
        rows=_rows(timelines, devices, merged),
        num_devices=num_devices,
        kinds=tuple(dict.fromkeys(event.kind for of_source in events.values() for event in of_source)),
        num_merged=num_merged,
    )


def shown_step(timeline: Timeline) -> int:
    """The step whose length is nearest to the median of all; the last of those."""
    spans: dict[int, tuple[float, float]] = {}
    for event in timeline.events:
        start_s, stop_s = spans.get(event.step, (event.start_s, event.stop_s))
        spans[event.step] = min(start_s, event.start_s), max(stop_s, event.stop_s)
    lengths = {step: stop_s - start_s for step, (start_s, stop_s) in spans.items()}
    middle_s = statistics.median(lengths.values())
    return min(lengths, key=lambda step: (abs(lengths[step] - middle_s), -step))


def shown_devices(sources: Iterable[Sequence[Event]], num_devices: int) -> tuple[int, ...]:
    """All, or of each group with the same work the least and the most busy one, then some in between."""
    if num_devices <= MOST_DEVICES:
        return tuple(range(num_devices))
    work: dict[int, set[tuple[str, str]]] = {device: set() for device in range(num_devices)}
    busy_s = [0.0] * num_devices
    for event in (event for events in sources for event in events):
        work[event.device].add((event.kind, event.block))
        busy_s[event.device] += event.stop_s - event.start_s if event.lane == "compute" else 0.0
    groups: dict[frozenset[tuple[str, str]], list[int]] = defaultdict(list)
    for device in range(num_devices):
        groups[frozenset(work[device])].append(device)
    queues = [_from_the_ends(sorted(group, key=lambda device: busy_s[device])) for group in groups.values()]
    taken = [queue[place] for place in range(num_devices) for queue in queues if place < len(queue)]
    return tuple(sorted(taken[:SHOWN_OF_MANY]))


def tracks(spans: Sequence[tuple[float, float]], *, most: int | None = None) -> tuple[int, ...]:
    """For spans in order of start, the first track that is free; the one that is free soonest where all are taken."""
    free_s: list[float] = []
    found = []
    for start_s, stop_s in spans:
        track = next((place for place, at_s in enumerate(free_s) if at_s <= start_s), len(free_s))
        if most is not None and track >= most:
            track = min(range(most), key=free_s.__getitem__)
        if track == len(free_s):
            free_s.append(stop_s)
        free_s[track] = max(free_s[track], stop_s)
        found.append(track)
    return tuple(found)


_Key = tuple[int, Lane, str]
"""Device, lane, source."""


def _from_zero(timeline: Timeline, step: int) -> list[Event]:
    events = [event for event in timeline.events if event.step == step]
    begin_s = min(event.start_s for event in events)
    moved = (replace(e, start_s=e.start_s - begin_s, stop_s=max(e.stop_s, e.start_s) - begin_s) for e in events)
    return sorted(moved, key=lambda event: event.start_s)


def _from_the_ends(group: list[int]) -> list[int]:
    """First, last, and then evenly spread between them."""
    count = len(group)
    halves = [0, count - 1]
    parts = 2
    while parts < 2 * count:
        halves += [count * odd // parts for odd in range(1, parts, 2)]
        parts *= 2
    return [group[place] for place in dict.fromkeys(halves)]


def _rows(timelines: Sequence[Timeline], devices: Sequence[int], strips: Mapping[_Key, Strip]) -> tuple[Row, ...]:
    shares = {timeline.source: timeline.utilisation() for timeline in timelines}
    of_device: dict[int, list[Strip]] = defaultdict(list)
    for (device, _, _), strip in strips.items():
        of_device[device].append(strip)
    return tuple(
        Row(
            device=device,
            utilisation={source: of[device] for source, of in shares.items() if device < len(of)},
            strips=tuple(of_device[device]),
        )
        for device in devices
    )


def _strips(events: Mapping[str, list[Event]], devices: Sequence[int]) -> dict[_Key, list[Bar]]:
    used = {(event.lane, source) for source, of_source in events.items() for event in of_source}
    kept = [(lane, source) for lane in LANES for source in events if (lane, source) in used]
    found: dict[_Key, list[Bar]] = {(device, lane, source): [] for device in devices for lane, source in kept}
    for source, of_source in events.items():
        for e in of_source:
            if (strip := found.get((e.device, e.lane, source))) is not None:
                strip.append(Bar(kind=e.kind, block=e.block, start_s=e.start_s, stop_s=e.stop_s, minibatch=e.minibatch))
    return found


def _bounded(strips: Mapping[_Key, list[Bar]], most_bars: int, length_s: float) -> tuple[dict[_Key, Strip], int]:
    """Strips with at most so many bars in all, or one for each where even that is too few; and how many were merged."""
    total = sum(map(len, strips.values()))
    parts, kept = _FINEST, dict(strips)
    while sum(map(len, kept.values())) > most_bars and parts >= 1:
        kept = {key: _merged(bars, length_s / parts) for key, bars in strips.items()}
        parts //= 2
    return {key: _strip(key, bars) for key, bars in kept.items()}, total - sum(map(len, kept.values()))


def _merged(bars: Sequence[Bar], finest_s: float) -> list[Bar]:
    """Bars shorter than `finest_s` that begin in the same part of the step become one."""
    kept = [bar for bar in bars if bar.stop_s - bar.start_s > finest_s]
    parts: dict[int, list[Bar]] = defaultdict(list)
    for bar in bars:
        if bar.stop_s - bar.start_s <= finest_s:
            parts[int(bar.start_s / finest_s) if finest_s else 0].append(bar)
    kept += [_together(some) for some in parts.values()]
    return sorted(kept, key=lambda bar: bar.start_s)


def _together(bars: Sequence[Bar]) -> Bar:
    if len(bars) == 1:
        return bars[0]
    spent: dict[str, float] = defaultdict(float)
    for bar in bars:
        spent[bar.kind] += bar.stop_s - bar.start_s
    kind = max(spent, key=spent.__getitem__)
    return replace(bars[0], kind=kind, stop_s=max(bar.stop_s for bar in bars), count=len(bars))


def _strip(key: _Key, bars: Sequence[Bar]) -> Strip:
    _, lane, source = key
    places = tracks([(bar.start_s, bar.stop_s) for bar in bars], most=_MOST_TRACKS)
    placed = tuple(replace(bar, track=track) for bar, track in zip(bars, places, strict=True))
    return Strip(lane=lane, source=source, num_tracks=max(places, default=0) + 1, bars=placed)
