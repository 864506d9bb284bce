"""A schedule as text that a person can read and write: one line an action, grouped by device.

    schedule 1
    device 0
      forward stem 0:8
      send stem 4:8 value=stem to=1
      receive stem 4:8 gradient=stem from=1
      backward stem 0:8
      reduce stem among=0..3
      step stem
    device 1
      …

After the kind comes the block. What has its default is left out: `minibatch=0`, no samples. Names with other characters
than letters, digits and `_.:/+-` stand in JSON's quotes. Empty lines and lines that start with `#` mean nothing.
`parse(format_schedule(s)) == s` for every schedule, sound or not.
"""

import functools
import json
import re
from collections.abc import Iterator
from itertools import count, groupby

from burstpool.errors import ScheduleError
from burstpool.schedule.actions import Action, Kind, Schedule

_PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)
_TOKEN = re.compile(r'\s*(?:(?P<key>[a-z]+)=)?(?P<value>"(?:[^"\\]|\\.)*"|[^\s"]+)(?=\s|$)')
_PEERS = {Kind.SEND: "to", Kind.RECEIVE: "from"}


def format_schedule(schedule: Schedule) -> str:
    """The whole text."""
    lines = [f"schedule {schedule.schema_version}"]
    for device, actions in enumerate(schedule.devices):
        lines.append(f"device {device}")
        lines += [f"  {format_action(action)}" for action in actions]
    return "\n".join(lines) + "\n"


def format_action(action: Action) -> str:
    """One line."""
    words = [action.kind.value, _quoted(action.block)]
    if action.minibatch:
        words.append(f"minibatch={action.minibatch}")
    if action.start or action.stop:
        words.append(f"{action.start}:{action.stop}")
    if action.value or action.gradient:
        words.append(f"{'gradient' if action.gradient else 'value'}={_quoted(action.value)}")
    if action.peer != -1:
        words.append(f"{_PEERS.get(action.kind, 'peer')}={action.peer}")
    if action.group:
        words.append(f"among={_ranges(action.group)}")
    return " ".join(words)


def parse(text: str, *, source: str = "this text") -> Schedule:
    """Reads what `format_schedule` wrote; errors name the line."""
    version: int | None = None
    devices: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{source}, line {number}"
        if version is None:
            version = _header(words, where)
        elif words[0] == "device":
            if words != ["device", str(len(devices))]:
                raise ScheduleError(f"{where}: expected 'device {len(devices)}', got {line.strip()!r}")
            devices.append([])
        elif not devices:
            raise ScheduleError(f"{where}: an action before the first 'device 0'")
        else:
            devices[-1].append(parse_action(line, source=where))
    if version is None:
        raise ScheduleError(f"{source} holds no schedule; its first line must be 'schedule {Schedule.SCHEMA_VERSION}'")
    return Schedule(schema_version=version, devices=tuple(map(tuple, devices)))


def parse_action(line: str, *, source: str = "this line") -> Action:
    """Reads one line; `source` names it in errors."""
    words = list(_words(line, source))
    if len(words) < 2 or words[0][0] or words[1][0]:
        raise ScheduleError(f"{source}: expected an action's kind and its block, got {line.strip()!r}")
    if words[0][1] not in Kind.__members__.values():
        raise ScheduleError(f"{source}: {words[0][1]!r} is no action; give {', '.join(Kind)}")
    kind, block = Kind(words[0][1]), words[1][1]
    fields: dict[str, object] = {}
    for key, value in words[2:]:
        for name, found in _field(kind, key, value, source).items():
            if name in fields:
                raise ScheduleError(f"{source}: {name} is given twice")
            fields[name] = found
    return Action(kind=kind, block=block, **fields)  # type: ignore[arg-type]  # _field gives each its type


def _header(words: list[str], where: str) -> int:
    if len(words) != 2 or words[0] != "schedule" or not words[1].isdecimal():
        raise ScheduleError(f"{where}: expected 'schedule {Schedule.SCHEMA_VERSION}', got {' '.join(words)!r}")
    if not 1 <= int(words[1]) <= Schedule.SCHEMA_VERSION:
        raise ScheduleError(f"{where}: schedule {words[1]} is newer than this release reads; upgrade burstpool")
    return int(words[1])


def _words(line: str, source: str) -> Iterator[tuple[str, str]]:
    """Each word as (key, value); the key is empty where there is none."""
    place, line = 0, line.rstrip()
    while place < len(line):
        found = _TOKEN.match(line, place)
        if found is None:
            raise ScheduleError(f"{source}: cannot read {line[place:].strip()!r}; is a quote missing?")
        value = found["value"]
        if value.startswith('"'):
            try:
                value = json.loads(value)
            except ValueError:
                raise ScheduleError(f"{source}: {value} is no JSON string") from None
        yield found["key"] or "", value
        place = found.end()


def _field(kind: Kind, key: str, value: str, source: str) -> dict[str, object]:
    try:
        if key == "":
            start, stop = value.split(":")
            return {"start": int(start), "stop": int(stop)}
        if key == "minibatch":
            return {"minibatch": int(value)}
        if key in ("value", "gradient"):
            return {"value": value, "gradient": key == "gradient"}
        if key == _PEERS.get(kind, "peer"):
            return {"peer": int(value)}
        if key == "among":
            return {"group": _members(value)}
    except ValueError:
        raise ScheduleError(f"{source}: cannot read {(f'{key}={value}' if key else value)!r}; {_ADVICE}") from None
    raise ScheduleError(f"{source}: {key}= means nothing to {kind}; {_ADVICE}")


_ADVICE = "write samples as 0:8, and minibatch=1, value=NAME, gradient=NAME, to=1, from=1 or among=0..3,5"


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


@functools.lru_cache(maxsize=256)  # each of a thousand members names the same group
def _ranges(numbers: tuple[int, ...]) -> str:
    """`0..3,5`: runs of rising numbers in short."""
    counter = count()
    runs = [list(run) for _, run in groupby(numbers, key=lambda number: number - next(counter))]
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@functools.lru_cache(maxsize=256)
def _members(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        found += range(int(first), int(last) + 1) if dots else (int(first),)
    return tuple(found)
