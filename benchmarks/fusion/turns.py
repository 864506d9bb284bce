"""Processes that build side by side, then take turns on the GPU to measure.

`run_all` starts them, some at once, and returns what each had to say. A process calls `all_are_built` when it has built
what it measures, which returns when all others have too or have had their time, and measures within `turn()`, with the
GPU to itself. One that stays longer than it may is stopped, lest the others wait for it to the end.

Knows nothing of what is measured. What a process started later builds while others measure already does meet them.
"""

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_FOLDER, _NAME = "BURSTPOOL_BENCHMARK_FOLDER", "BURSTPOOL_BENCHMARK_PROCESS"
"""Environment of a process: where it meets the others, and what it is called."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a process has left."""

    output: str
    errors: str
    why: str
    """Why it was stopped, or never started; empty if it ended by itself."""


def all_are_built() -> None:
    """Says that this process is ready to measure, and waits for the others."""
    folder = Path(os.environ[_FOLDER])
    (folder / f"{os.environ[_NAME]}.built").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)


@contextmanager
def turn() -> Iterator[None]:
    """The GPU to oneself, among these processes."""
    with (Path(os.environ[_FOLDER]) / "turn").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _say_whose(lock, f"{os.getpid()} {time.time()}")
        try:
            yield
        finally:
            _say_whose(lock, "")
            fcntl.flock(lock, fcntl.LOCK_UN)


def _say_whose(lock: IO[str], text: str) -> None:
    lock.truncate(0)
    lock.write(text)
    lock.flush()


def run_all(
    commands: Mapping[str, Sequence[str]],
    *,
    at_once: int,
    build_s: float,
    longest_turn_s: float,
    until: float,
    environment: Mapping[str, str],
) -> dict[str, Ended]:
    """Runs the commands, by name; no longer than `until`, by the monotonic clock."""
    with tempfile.TemporaryDirectory() as folder:
        crowd = _Crowd(commands, {**os.environ, **environment}, Path(folder), longest_turn_s)
        begun = time.monotonic()
        try:
            while time.monotonic() < until and crowd.go_on(at_once):
                if not crowd.building() or time.monotonic() > begun + build_s:
                    (Path(folder) / "go").touch()
                crowd.stop_who_stays()
                time.sleep(0.1)
        finally:  # also when this is interrupted: none is left behind
            ended = {name: crowd.ended(name) for name in commands}
        return ended


class _Crowd:
    """The processes, seen from outside."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        folder: Path,
        longest_turn_s: float,
    ) -> None:
        self._commands, self._environment = commands, environment
        self._folder, self._longest_turn_s = folder, longest_turn_s
        self._waiting = list(commands)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._why: dict[str, str] = {}

    def go_on(self, at_once: int) -> bool:
        """Starts those that there is room for; whether any runs."""
        alive = sum(process.poll() is None for process in self._running.values())
        while self._waiting and alive < at_once:
            self._start(self._waiting.pop(0))
            alive += 1
        return alive > 0

    def _start(self, name: str) -> None:
        environment = {**self._environment, _FOLDER: str(self._folder), _NAME: name}
        with self._file(name, "out").open("wb") as output, self._file(name, "err").open("wb") as errors:
            self._running[name] = subprocess.Popen(self._commands[name], stdout=output, stderr=errors, env=environment)

    def building(self) -> list[str]:
        """Those that run and are not ready to measure."""
        alive = (name for name, process in self._running.items() if process.poll() is None)
        return [name for name in alive if not self._file(name, "built").exists()]

    def stop_who_stays(self) -> None:
        """Ends the process whose turn has lasted too long."""
        try:
            pid, since = (self._folder / "turn").read_text().split()
        except (FileNotFoundError, ValueError):  # nobody's turn
            return
        if time.time() - float(since) <= self._longest_turn_s:
            return
        for name, process in self._running.items():
            if process.pid == int(pid) and process.poll() is None:
                self._why[name] = f"stopped: its turn took more than {self._longest_turn_s:.0f} s"
                process.kill()

    def ended(self, name: str) -> Ended:
        """What it left; ends it if it runs."""
        if name not in self._running:
            return Ended("", "", "skipped: the time was up before it began")
        process = self._running[name]
        if process.poll() is None:
            self._why[name] = "skipped: the time was up before it was measured"
            process.kill()
        process.wait()
        output, errors = (self._file(name, kind).read_text(errors="replace") for kind in ("out", "err"))
        return Ended(output, errors, self._why.get(name, ""))

    def _file(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}"
