"""How far is the simulator from what really happens? Predicted over measured step time, data parallelism on the CPU.

Measures this machine's cores and link, each model's layers, predicts the step, then trains and compares. Everything is
measured just before, on the same machine; as many workers as cores, so that they do not share any. Bar: median error
at most 10%, worst 20%, over at least 12 cases. One JSON line at the end.

    python benchmarks/simulation/run.py [--steps 60]
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from burstpool import load_job
from burstpool.cluster.detect import detect
from burstpool.cluster.spec import ClusterSpec
from burstpool.plan import data
from burstpool.profiling.measure import profile_job
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.trainer import train

MODELS = ("tiny_vgg", "tiny_resnet", "tiny_inception", "tiny_lstm", "tiny_transformer")
DEVICES = (1, 2)
BATCHES = (16, 64)


def case(name: str, cluster: ClusterSpec, batch: int, steps: int) -> dict[str, Any]:
    """One model on one cluster at one batch."""
    job = dataclasses.replace(load_job(f"zoo:{name}"), batch=batch)
    share = batch // cluster.num_devices
    profile = profile_job(job, batches=[share], use_cache=False)
    plan = data.plan(profile, cluster, batch=batch, graph=trace_job(job).graph)
    # Exchanges of batch norm and masks of the whole minibatch are not modelled: both local, as DDP has them.
    options = RunOptions(batch_norm="local", dropout="local", checkpoint_every=0)
    with tempfile.TemporaryDirectory() as folder:
        result = train(f"zoo:{name}", plan, steps=steps, run_folder=Path(folder) / "run", options=options)
    measured_s = statistics.median(loss.step_time_s for loss in result.losses[steps // 3 :])
    predicted_s = plan.step_time_s or 0.0
    return {
        "model": name,
        "devices": cluster.num_devices,
        "batch": batch,
        "predicted_ms": round(predicted_s * 1e3, 3),
        "measured_ms": round(measured_s * 1e3, 3),
        "error": round(predicted_s / measured_s - 1, 3),
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    rows = []
    for devices in DEVICES:
        cluster = detect(device="cpu", num_devices=devices)
        for name in MODELS:
            for batch in BATCHES:
                rows.append(case(name, cluster, batch, options.steps))
                print(rows[-1], flush=True)
    errors = sorted(abs(row["error"]) for row in rows)
    print(json.dumps({"cases": rows, "median_error": statistics.median(errors), "worst_error": errors[-1]}))


if __name__ == "__main__":
    main()
