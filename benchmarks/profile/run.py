"""Do a profile's layers add up to the whole step, and how long does profiling take?

Measures each model's layers alone and its whole step in one piece, in one run, and prints sum/whole for each model and
batch (bar: within 10%), then the time to trace and profile ResNet-152 at seven batches (bar: 120 s on an H200), and
the time to import burstpool (bar: 0.2 s). One JSON line at the end.

    python benchmarks/profile/run.py [--device cuda] [--autocast bf16]
"""

import argparse
import json
import subprocess
import sys
import time

from burstpool import load_job
from burstpool.profiling.measure import profile_job

MODELS = {
    "cuda": ["vgg16", "wide_resnet101_2", "inception_v3", "transformer"],
    "cpu": ["tiny_mlp", "tiny_vgg", "tiny_resnet", "tiny_inception", "tiny_lstm", "tiny_transformer"],
}
BATCHES = [1, 4, 16, 64]
SEVEN_BATCHES = [1, 2, 4, 8, 16, 32, 64]


def sums(device: str, autocast: str | None) -> dict[str, dict[int, float]]:
    """Model → batch → sum of layers over whole step."""
    found = {}
    for name in MODELS[device]:
        batches = BATCHES[1:] if name == "inception_v3" else BATCHES
        # Inception's auxiliary head ends in a batch norm over 1×1 maps, which no framework can train on one sample.
        start = time.perf_counter()
        profile = profile_job(
            load_job(f"zoo:{name}"), device=device, autocast=autocast, batches=batches, use_cache=False
        )
        found[name] = {batch: round(profile.sum_over_step(batch), 3) for batch in profile.step_s}
        whole = {batch: f"{seconds * 1e3:.2f} ms" for batch, seconds in profile.step_s.items()}
        print(f"{name:<20} sum/whole {found[name]}  whole {whole}  in {time.perf_counter() - start:.0f} s", flush=True)
    return found


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(MODELS))
    parser.add_argument("--autocast", choices=["bf16", "fp16"])
    options = parser.parse_args()
    result: dict[str, object] = {"device": options.device, "autocast": options.autocast}
    ratios = sums(options.device, options.autocast)
    result["sum_over_whole"] = ratios
    result["furthest_from_1"] = max((abs(r - 1), r) for row in ratios.values() for r in row.values())[1]
    if options.device == "cuda":
        start = time.perf_counter()
        profile_job(
            load_job("zoo:resnet152"), device="cuda", autocast=options.autocast, batches=SEVEN_BATCHES, use_cache=False
        )
        result["resnet152_seven_batches_s"] = round(time.perf_counter() - start, 1)
    clock = "import time; t = time.perf_counter(); import burstpool; print(time.perf_counter() - t)"
    times = [float(subprocess.check_output([sys.executable, "-c", clock])) for _ in range(5)]
    result["import_s"] = round(min(times), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
