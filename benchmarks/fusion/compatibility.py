"""Which unmodified models of torchvision and transformers can be fused, and does the array do what its members do?

Fuses two of each, with weights of their own, in training mode, and verifies: one step in double precision against the
members alone, operator by operator, gradients included. The models are those of benchmarks/compatibility. Writes
docs/fusion-compatibility.md with --write.

    python benchmarks/fusion/compatibility.py [--device cuda] [--only NAME,NAME] [--processes 8] [--json FILE] [--write]
"""

import argparse
import collections
import datetime
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from burstpool.errors import BurstpoolError
from burstpool.fusion import fuse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fusion-compatibility.md"
MEMBERS = 2
Build = Callable[[], tuple[torch.nn.Module, Any]]


def main() -> None:
    options = parsed()
    models = known_models()
    names = [name for name in models if not options.only or name.split()[-1] in options.only]
    if options.processes > 1:
        rows = in_processes(names, options)
    else:
        rows = {}
        for name in names:
            rows[name] = examine(models[name], options.device)
            print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows))
    print(json.dumps(rows))
    if options.write:
        write(rows, options)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuse and verify unmodified models.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", default="", help="names, by commas")
    parser.add_argument("--processes", type=int, default=1, help="that share the models among them")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all; what is not done by then says so")
    parser.add_argument("--json", default="", help="where to write the rows")
    parser.add_argument("--write", action="store_true", help="write the page in docs/")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else []
    return options


def reason(error: Exception) -> str:
    """In words; how much memory every process holds is of no interest."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory, which the other processes shared"
    return f"{type(error).__name__}: {error}"[:300]


def known_models() -> dict[str, Build]:
    """Name → function that builds a model and an example, of benchmarks/compatibility."""
    spec = importlib.util.spec_from_file_location("compatibility_run", ROOT / "benchmarks" / "compatibility" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {**dict(module.torchvision_models()), **dict(module.transformers_models())}


def examine(build: Build, device: str) -> dict[str, Any]:
    """One row: whether it fused and verified, its operators by the way they run, or the reason."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models = []
            for seed in range(MEMBERS):
                torch.manual_seed(seed)
                model, example = build()
                models.append(model.to(device).train())
            example = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), example)
            array = fuse(models, example)
            fused_s = time.perf_counter() - start
            array.verify()
    except BurstpoolError as error:
        return {"fused": False, "reason": str(error)[:300], "seconds": time.perf_counter() - start}
    except Exception as error:
        return {
            "fused": False,
            "reason": reason(error),
            "seconds": time.perf_counter() - start,
        }
    ways = collections.Counter(step.lowered.way for step in array.mode.plan(frozenset()).inner())
    return {"fused": True, "ways": dict(ways), "seconds": round(time.perf_counter() - start, 1), "fused_s": fused_s}


def in_processes(names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The models dealt out to several processes; a slow one holds up only its own."""
    shards = [names[i :: options.processes] for i in range(options.processes)]
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for index, shard in enumerate(shards):
            if not shard:
                continue
            command = [sys.executable, __file__, "--device", options.device, "--json", f"{folder}/{index}"]
            command += ["--only", ",".join(name.split()[-1] for name in shard)]
            environment = os.environ | {"OMP_NUM_THREADS": "2"}
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment))
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in running:
            process.kill()
            process.wait()
        found: dict[str, dict[str, Any]] = {}
        for file in Path(folder).iterdir():
            found |= json.loads(file.read_text())
    late = {"fused": False, "reason": f"not tried: {options.seconds:.0f} s were over"}
    return {name: found.get(name, late) for name in names}


def write(rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """The page in docs/."""
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    command = f"--device {options.device} --processes {options.processes} --write"
    done = sum(row["fused"] for row in rows.values())
    lines = [
        "# Which models can be fused",
        "Unmodified models, two of each with weights of their own, in training mode: fused, then verified by one step",
        "in double precision against the members alone, operator by operator, gradients included. transformers models",
        "are small configurations of the full code. On CUDA dropout is left out of the comparison: torch's fused",
        f"kernels draw other numbers. Made by `python benchmarks/fusion/compatibility.py {command}`.",
        "",
        f"{done} of {len(rows)} models; {datetime.date.today()}, {where}, torch {torch.__version__}.",
        "",
        "| model | fused and verified | operators by rule / vmap / loop | seconds | remark |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        ways = row.get("ways", {})
        counts = " / ".join(str(ways.get(way, 0)) for way in ("rule", "vmap", "loop")) if ways else ""
        words = re.sub(r"\S*site-packages/", "", str(row.get("reason", "")))
        remark = " ".join(words.split()).replace("|", "\\|")[:160]
        lines.append(
            f"| {name} | {'yes' if row['fused'] else 'no'} | {counts} | {row.get('seconds', 0.0):.1f} | {remark} |"
        )
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
