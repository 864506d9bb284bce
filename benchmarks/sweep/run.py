"""A sweep beside training its trials one after another: samples a second, one JSON object and a table.

    python benchmarks/sweep/run.py                          16 and 64 trials of a small MLP on handwritten digits
    python benchmarks/sweep/run.py --trials 16 --steps 1000 --search asha
    python benchmarks/sweep/run.py --device cuda --job zoo:tiny_resnet

One after another is a plain loop of the user's model and torch's optimizer, every trial to its end, with the same
batches. Both ways load data, and both are run in turn `--repeats` times, the smallest time of each counts: what else a
machine does only ever adds. A sweep's whole time has measuring the array size, capturing the model, evaluation,
checkpoints and the report in it; Python's imports are in neither. With `--search asha` the sweep trains fewer steps, so
that only the time to the best trial compares.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import burstpool
from burstpool.job import Job, job_function, make_job, model_arguments
from burstpool.sweeping.feed import Feed
from burstpool.sweeping.outcome import SweepResult
from burstpool.sweeping.space import checked_space

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "digits_mlp.py")
RATES = (1e-3, 1.0)


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    space = {"lr": f"log:{RATES[0]}..{RATES[1]}"}
    warm_up(options, space)
    rows = [measured(options, space, trials) for trials in options.trials]
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu"
    print(json.dumps({"device": where, "torch": torch.__version__, "options": vars(options), "rows": rows}))
    for row in rows:
        print(json.dumps(row, indent=1), file=sys.stderr)


def warm_up(options: argparse.Namespace, space: dict[str, str]) -> None:
    """Imports and torch's own start are in no figure."""
    swept(options, space, 2, steps=2)
    serially(jobs(options, space, 1), 2, options.device)


def measured(options: argparse.Namespace, space: dict[str, str], trials: int) -> dict[str, Any]:
    """The smallest times of both ways, run in turn."""
    serial_s, results = [], []
    for _ in range(options.repeats):
        serial_s.append(serially(jobs(options, space, trials), options.steps, options.device))
        results.append(swept(options, space, trials, steps=options.steps))
    whole_s = min(result.state.wall_time_s for result in results)
    fastest = max(results, key=lambda result: result.samples_per_s)
    samples = trials * options.steps * fastest.state.num_samples // max(1, sum(t.step for t in fastest.trials))
    return {
        "trials": trials,
        "steps": options.steps,
        "search": options.search,
        "array_sizes": sorted({result.record.sizing.places for result in results}),
        "serial_s": min(serial_s),
        "serial_samples_per_s": samples / min(serial_s),
        "sweep_s": whole_s,
        "sweep_train_s": fastest.state.train_time_s,
        "sweep_samples_per_s": fastest.samples_per_s,
        "steps_trained": sum(trial.step for trial in fastest.trials),
        "throughput_over_serial": fastest.samples_per_s * min(serial_s) / samples,
        "time_over_serial": min(serial_s) / whole_s,
    }


def swept(options: argparse.Namespace, space: dict[str, str], trials: int, *, steps: int) -> SweepResult:
    with tempfile.TemporaryDirectory() as folder:
        return burstpool.sweep(
            options.job,
            space,
            search=options.search,
            trials=trials,
            steps=steps,
            mode=options.mode,
            device=options.device,
            run_folder=Path(folder) / "run",
        )


def jobs(options: argparse.Namespace, space: dict[str, str], trials: int) -> list[Job]:
    """The settings that a random search draws."""
    name, function = job_function(options.job)
    checked = checked_space(space, function, source=options.job)
    drawn = (checked.draw(number, seed=0) for number in range(trials))
    return [make_job(function, settings, source=options.job, name=name) for settings in drawn]


def serially(made: list[Job], steps: int, device: str) -> float:
    """Seconds to train them all, one after another."""
    begin = time.perf_counter()
    for job in made:
        model = job.build_model().to(device)
        optimizer = job.optimizer(model.parameters())
        feed = Feed([job], [0], batch=None, device=torch.device(device))
        for _ in range(steps):
            batch = feed.take()
            args, kwargs = model_arguments(batch.inputs)
            optimizer.zero_grad()
            job.loss(model(*args, **kwargs), batch.target).backward()
            optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default=EXAMPLE)
    parser.add_argument("--trials", default=[16, 64], type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--steps", default=500, type=int)
    parser.add_argument("--search", default="random")
    parser.add_argument("--mode", default="fastest")
    parser.add_argument("--repeats", default=2, type=int)
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
