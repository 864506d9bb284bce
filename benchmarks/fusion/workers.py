"""Processes that answer requests for `largest.py`, one at a time each, and one that is always on its way.

A process that does not answer in time, or that ended, is an answer too. Ignores what requests mean: memory_use.py.
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("largest.py")


def allocator() -> str:
    """Settings of torch's: without segments that grow, half of a GPU may be free and in no piece large enough."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


class Worker:
    """A process that answers requests (memory_use.py); one at a time."""

    def __init__(self, options: argparse.Namespace, errors: Path) -> None:
        """`errors` is the file for what it has to say."""
        command = [sys.executable, str(_PROGRAM), "--worker", "--device", options.device, "--dtype", options.dtype]
        command += ["--limit-bytes", str(options.limit_bytes), *(["--hfta", options.hfta] if options.hfta else [])]
        self._errors = errors
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": allocator()}
        with errors.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
            )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.usable = True
        """Whether it can be asked again."""

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, workload: str, way: str, members: int = 0, *, runs: int = 1, until: float) -> dict[str, Any]:
        """The answer, or `{"error": …}` where none came by then; the process has ended in that case."""
        request = json.dumps({"workload": workload, "way": way, "members": members, "runs": runs})
        begun = time.monotonic()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=max(0.0, until - begun))
        except queue.Empty:
            self.close()
            return {"error": f"not done within {time.monotonic() - begun:.0f} s", "by_memory": False, "late": True}
        except (BrokenPipeError, ValueError):  # it has ended, or was closed
            line = ""
        if not line:
            self.close()
            last = (self._errors.read_text(errors="replace").strip().splitlines() or ["it ended"])[-1]
            return {"error": f"the process ended: {last}"[:200], "by_memory": False}
        found: dict[str, Any] = json.loads(line)
        # After an error that is not the allocator's, CUDA may answer nothing right any more.
        self.usable = not found.get("broken") and found.get("by_memory", True)
        return found

    def close(self) -> None:
        """Ends the process, and with it what it holds of the GPU."""
        self.usable = False
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5.0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a request that it did not take
            self._process.stdin.close()
        if not self._reader.is_alive():  # some process that it started may hold the other end
            self._process.stdout.close()


class Crew:
    """Processes, one of them always on its way: importing torch takes seconds, and no memory of the GPU."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._all: list[Worker] = []
        self._spare: Worker | None = None
        self._lock = threading.Lock()

    def take(self) -> Worker:
        """One that nobody has used."""
        with self._lock:
            taken = self._spare or self._made()
            self._spare = self._made()
            return taken

    def usable(self, worker: Worker) -> Worker:
        """The same, or another in its place: then it ends first, for it may hold memory."""
        if worker.usable:
            return worker
        worker.close()
        return self.take()

    def _made(self) -> Worker:
        self._all.append(Worker(self._options, self._folder / f"{len(self._all)}.err"))
        return self._all[-1]

    def close(self) -> None:
        """Ends them all."""
        for worker in self._all:
            worker.close()
        if self._options.log:
            texts = [path.read_text(errors="replace") for path in sorted(self._folder.glob("*.err"))]
            Path(self._options.log).write_text("\n".join(texts))
