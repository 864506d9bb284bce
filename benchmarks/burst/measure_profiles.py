"""Measures the profiles that the simulation at scale starts from, and writes them as `MODEL.DEVICE.json`.

Each model is traced and its layers are measured at every batch, as `burstpool profile` does; batches that do not fit
are left out, largest first, and batches a model cannot train on (Inception-v3's auxiliary head normalises over the
batch and refuses one sample) with the reason on standard error. One line a model; with `--json`, one JSON object.

    python benchmarks/burst/measure_profiles.py --device cuda --out benchmarks/burst/profiles
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burstpool import load_job
from burstpool.errors import ProfileError
from burstpool.job import Job
from burstpool.model.zoo import SMALL
from burstpool.profiling.measure import profile_job
from burstpool.profiling.profile import Profile

MODELS = ("vgg16", "wide_resnet101_2", "inception_v3", "bert_medium")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST_BATCH = {"inception_v3": 2}
"""Model → the smallest batch it trains on."""


def measure(job: Job, batches: Sequence[int], *, device: str, autocast: str | None) -> Profile:
    """The profile at as many of the batches as fit."""
    batches = sorted(batches)
    while True:
        try:
            return profile_job(job, device=device, autocast=autocast, batches=batches, use_cache=False)
        except ProfileError as error:
            if "out of memory" not in str(error) or len(batches) == 1:
                raise
            print(f"{error}", file=sys.stderr)
            batches = batches[:-1]


def measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one model, writes its profile, and says how it went."""
    start = time.perf_counter()
    job = load_job(f"zoo:{name}", dict(SMALL[name]) if arguments.small else None)
    wanted = [batch for batch in arguments.batches if batch >= LEAST_BATCH.get(name, 1)]
    if len(wanted) < len(arguments.batches):
        print(f"{name} does not train on fewer than {LEAST_BATCH[name]} samples", file=sys.stderr)
    found = measure(job, wanted, device=arguments.device, autocast=arguments.autocast)
    path = arguments.out / f"{found.model}.{found.device.lower()}.json"
    found.save(path)
    sums = [found.sum_over_step(batch) for batch in found.step_s]
    return {
        "model": name,
        "path": str(path),
        "batches": list(found.batches),
        "num_layers": len(found.layers),
        "sum_over_whole": [min(sums), max(sums)] if sums else None,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "profiles")
    parser.add_argument("--models", nargs="+", choices=list(SMALL), default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--autocast", choices=["bf16", "fp16", "none"], help="bf16 on CUDA if left out")
    parser.add_argument("--small", action="store_true", help="the zoo's small settings, to try the script on a CPU")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args()
    usual = "bf16" if arguments.device.startswith("cuda") else None
    arguments.autocast = None if arguments.autocast == "none" else arguments.autocast or usual
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.models:
        rows.append(measured(name, arguments))
        print(rows[-1], file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps({"profiles": rows, "seconds": sum(row["seconds"] for row in rows)}))


if __name__ == "__main__":
    main()
