"""A foreground and a background job on one GPU, in every way there is: slowdown of the one, speed kept by the other.

    python benchmarks/sharing/cuda.py                                              all pairs
    python benchmarks/sharing/cuda.py --foregrounds vgg16:4 --backgrounds resnet18:8 --seconds 5
    python benchmarks/sharing/cuda.py --pairs vgg16:4+resnet50:32,vgg16:1+array:16 --ways ours --seconds 60

Ways: two processes (the driver's time slices); two processes under MPS, the background with a share of the threads;
one process with two streams, of the same and of different priority, nothing held back; ours at several budgets; ours
with the gaps of an 8-device burst plan replayed in the foreground. In all of them both jobs' steps are CUDA graphs of
the same kernels and their samples are on the device already. Every way is measured next to the foreground alone, and
compared with it: `slowdown` and `slowdown_p95` over the mean step alone, `kept` over the background's steps a second
alone. Prints one JSON object on standard output, lines on standard error as they come.
"""

import argparse
import collections
import functools
import gc
import itertools
import json
import math
import multiprocessing as mp
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

FOREGROUNDS = (
    "vgg16:1,vgg16:4,vgg16:16,wide_resnet101_2:1,wide_resnet101_2:4,wide_resnet101_2:16,inception_v3:4,bert_medium:8"
)
BACKGROUNDS = "resnet50:32,resnet18:8,array:16"
BUDGETS = (1.05, 1.10, 1.20)
MPS_PERCENT = (100, 50, 30, 10)
LEAST_STEPS = 80
LONGEST_ALONE_S = 3.0
"""For which the foreground runs alone before a line of ours, and after it."""
LONG_STEP_S = 0.03
"""Of steps longer than that, half as many are the least."""
LEAD_S = 0.1
"""How long a background process runs before the foreground's."""
MPS_FOLDER = "/tmp/burstpool-mps"
ARRAY_MEMBERS = 16
"""Small models in the fused array."""
PIECE_S = 3e-4
BURST_LIMIT = 1.5
"""Of the plan whose gaps are replayed."""
SHORTEST_GAP_S = 5e-5
PROFILES = Path(__file__).parents[1] / "burst" / "profiles"


@dataclass(frozen=True, slots=True)
class Which:
    """`"vgg16:4"`."""

    name: str
    batch: int

    @classmethod
    def parse(cls, text: str) -> "Which":
        name, batch = text.split(":")
        return cls(name, int(batch))

    def __str__(self) -> str:
        return f"{self.name}:{self.batch}"


class FixedFeeder:
    """One batch again and again: what is compared is the GPU, not the loading."""

    def __init__(self, job: Any) -> None:
        from torch.utils import _pytree as pytree

        from burstpool.run.loading import Batch, Batches

        batch = Batches(job, ((0, job.batch),), batch=job.batch).load()[0][0]
        inputs, target = pytree.tree_map_only(torch.Tensor, lambda x: x.pin_memory(), (batch.inputs, batch.target))
        self._batch = [[Batch(0, job.batch, inputs, target)]]

    def take(self) -> Any:
        return self._batch

    def used(self, stream: Any) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to end."""


def at_work(which: Which, control: Any, stream: Any, piece_s: float) -> Any:
    """The job, captured."""
    import dataclasses

    from burstpool.job import load_job
    from burstpool.run.options import RunOptions
    from burstpool.share.array_steps import ArrayStep
    from burstpool.share.at_work import JobAtWork
    from burstpool.share.graph_steps import GraphStep

    if which.name == "array":
        settings = {"image_size": 32, "num_classes": 10}
        one = dataclasses.replace(at_rest(load_job("zoo:resnet18", settings)), batch=which.batch)
        work = JobAtWork(
            str(which),
            ArrayStep([one] * ARRAY_MEMBERS, stream=stream, piece_s=piece_s, autocast="bf16"),
            FixedFeeder(one),
        )
    else:
        job = dataclasses.replace(at_rest(load_job(f"zoo:{which.name}")), batch=which.batch)
        options = RunOptions(device="cuda", autocast="bf16")
        steps = GraphStep(job, stream=stream, control=control, piece_s=piece_s, options=options)
        work = JobAtWork(str(which), steps, FixedFeeder(job))
    work.start()
    gc.collect()
    torch.cuda.empty_cache()  # what the eager steps had taken: many processes share the GPU's memory here
    return work


def at_rest(job: Any) -> Any:
    """The job with a learning rate of next to nothing: on one batch again and again it would end in NaN."""
    import dataclasses

    def optimizer(parameters: Any) -> Any:
        made = job.optimizer(parameters)
        for group in made.param_groups:
            group["lr"] = 1e-9
        return made

    return dataclasses.replace(job, optimizer=optimizer, scheduler=None)


def prepare() -> None:
    """What every process sets."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


# ---- a process that plays one job, for the ways with two processes


def play(which: Which, pipe: Connection) -> None:
    """Builds the job, then replays it for as long as it is told."""
    from burstpool.share.gpu import alone_in_a_group, streams

    prepare()
    with alone_in_a_group() as control:
        high, _ = streams(torch.device("cuda", 0))
        work = at_work(which, control, high, float("inf"))
        pipe.send("ready")
        while (seconds := pipe.recv()) is not None:
            pipe.send(played(work.steps, high, seconds))


def played(steps: Any, stream: Any, seconds: float) -> dict[str, Any]:
    """Replays with two steps under way; when each ended, by the host's clock, and how long it took on the device."""
    events: collections.deque[Any] = collections.deque()
    times, ends, last = [], [], None
    stop = time.monotonic() + seconds
    with torch.cuda.stream(stream):
        while time.monotonic() < stop:
            for piece in steps.pieces:
                piece()
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record(stream)
            if len(events) > 2:
                done = events.popleft()
                done.synchronize()
                ends.append(time.monotonic())
                if last is not None:
                    times.append(last.elapsed_time(done) / 1e3)
                last = done
        torch.cuda.synchronize()
    return {"times": times, "ends": ends}


class Player:
    """That process, from outside."""

    def __init__(self, which: Which, *, mps_percent: int | None = None) -> None:
        changes = {} if mps_percent is None else {"CUDA_MPS_PIPE_DIRECTORY": f"{MPS_FOLDER}/pipe"}
        if mps_percent is not None and mps_percent < 100:
            changes["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(mps_percent)
        before = dict(os.environ)
        os.environ.update(changes)
        self.pipe, theirs = mp.Pipe()
        self.process = mp.get_context("spawn").Process(target=play, args=(which, theirs), daemon=True)
        self.process.start()
        os.environ.clear()
        os.environ.update(before)
        theirs.close()

    def wait(self) -> None:
        assert self.pipe.recv() == "ready"

    def go(self, seconds: float) -> None:
        self.pipe.send(seconds)

    def result(self) -> dict[str, Any]:
        return self.pipe.recv()


def two_processes(foreground: Player, background: Player, seconds: float, own_rate: float) -> dict[str, float]:
    """Both at once, next to the foreground alone; `own_rate`: the background's steps a second with the GPU its own."""
    foreground.go(seconds / 2)
    alone = foreground.result()
    background.go(seconds + 2 * LEAD_S)
    time.sleep(LEAD_S)
    begun = time.monotonic()
    foreground.go(seconds)
    shared = foreground.result()
    ended = time.monotonic()
    inside = [end for end in background.result()["ends"] if begun + 0.1 * seconds <= end <= ended - 0.1 * seconds]
    rate = (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 1 else 0.0
    times = shared["times"][len(shared["times"]) // 20 :]
    return compared(times, statistics.mean(alone["times"]), rate / own_rate)


def compared(times: Sequence[float], alone_s: float, kept: float) -> dict[str, float]:
    """The figures of one case."""
    from burstpool.share.announce import p95

    slowdown = statistics.mean(times) / alone_s
    return {
        "slowdown": slowdown,
        "slowdown_p95": p95(times) / alone_s,
        "kept": kept,
        "sum_of_shares": 1 / slowdown + kept,
        "alone_s": alone_s,
    }


# ---- a process that shares its GPU between one foreground and all backgrounds


def share(which: Which, backgrounds: Sequence[Which], pipe: Connection) -> None:
    """Builds all jobs, then does what it is told: (way, background, budget, seconds, a background's step alone)."""
    from burstpool.share.at_work import BackgroundWork, move
    from burstpool.share.gpu import alone_in_a_group, streams
    from burstpool.share.width import Widths

    prepare()
    with alone_in_a_group() as control:
        high, low = streams(torch.device("cuda", 0))
        plain = torch.cuda.Stream()
        foreground = at_work(which, control, high, 6e-4)
        works = {str(name): at_work(name, control, low, PIECE_S) for name in backgrounds}
        pipe.send("ready")
        pipe.recv()
        # Once more, now that no other process uses the GPU: pieces are cut and compared by how long they take.
        for work in (foreground, *works.values()):
            work.steps.alone_s = math.nan
            work.steps.capture()
        unranked = on_plain_stream(foreground, plain)
        for work in (foreground, *works.values()):
            lengths = [round(1e3 * time_s, 3) for time_s in work.steps.piece_times_s]
            print(
                f"{work.name}: {1e3 * work.steps.alone_s:.3f} ms, pieces {lengths}"[:400], file=sys.stderr, flush=True
            )
        widths: dict[str, Widths] = {}
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            way, name, budget, seconds, own_s = order
            work = works[name]
            work.losses.clear()
            work.steps.alone_s = own_s or work.steps.alone_s
            try:
                if way == "ours":
                    widths[name] = widths.get(name) or Widths(foreground.steps, work.steps)
                    part = widths[name].take(slowdown=budget)
                    answer = {**ours(foreground, BackgroundWork(work), budget, seconds, None), "multiprocessors": part}
                elif work.steps.stream != low:
                    move(work.steps, low)
                if way == "gaps":
                    answer = ours(foreground, BackgroundWork(work), budget, seconds, gaps_of(which, foreground))
                elif way == "priority":
                    answer = free(foreground, work, seconds)
                elif way == "streams":
                    answer = free(foreground, work, seconds, stream=plain, pieces=unranked)
            except Exception as error:
                answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
            pipe.send(answer)


def ours(foreground: Any, background: Any, budget: float, seconds: float, program: Any) -> dict[str, Any]:
    """Held by the controller, next to the foreground alone before and after."""
    from burstpool.share.budget import Budget
    from burstpool.share.gpu import Idle, SharedGpu

    def alone() -> list[float]:
        gpu = SharedGpu(foreground, (), Budget(slowdown=budget), program=program)
        gpu.run(max(int(min(0.15 * seconds, LONGEST_ALONE_S) / step_s), least_steps // 3))
        return gpu.measured.step_s[5:]

    idle_s = sum(part.length_s for part in program or () if isinstance(part, Idle))
    step_s = foreground.steps.alone_s + idle_s
    least_steps = LEAST_STEPS if step_s < LONG_STEP_S else LEAST_STEPS // 2
    plain_s = plain_loop(foreground.steps, foreground.feeder, 40) if program is None else 0.0
    before = alone()
    begun = time.monotonic()
    gpu = SharedGpu(foreground, (background,), Budget(slowdown=budget), program=program)
    gpu.run(max(int(seconds / step_s), least_steps))
    took_s = time.monotonic() - begun
    after = alone()
    alone_s = statistics.mean(before + after)
    times = gpu.measured.step_s[20:]
    work_s = sum(gpu.measured.background_s[20:])
    kept = work_s / sum(times) * background.work.steps.alone_s / sum(background.work.steps.piece_times_s)
    return {
        **compared(times, alone_s, kept),
        "own_s": background.work.steps.alone_s,
        "steps": len(times),
        "took_s": took_s,
        "background_steps": background.steps_done,
        "gap_share": idle_s / step_s,
        "launch_overhead": alone_s / plain_s - 1 if plain_s else None,
        "overlap_cost": gpu.controller.overlap_cost.value,
        "base_error": gpu.controller.alone_s / alone_s - 1,
    }


def plain_loop(steps: Any, feeder: Any, count: int) -> float:
    """Seconds of a step in the usual training loop over the same graphs: no events, no controller."""
    marks = []
    losses: collections.deque[Any] = collections.deque()
    for _ in range(count):
        steps.begin(feeder.take())
        with torch.cuda.stream(steps.stream):
            for piece in steps.pieces:
                piece()
        loss = steps.end()
        with torch.cuda.stream(steps.stream):
            losses.append(torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True))
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record(steps.stream)
        if len(marks) > 2:
            marks[-2].synchronize()
    torch.cuda.synchronize()
    return statistics.mean(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks[5:]))


def on_plain_stream(work: Any, plain: Any) -> list[Any]:
    """The same step captured on a stream of the background's priority: a graph keeps that of its capture."""
    steps = work.steps
    kept = steps.stream, steps.pieces, steps.piece_times_s, steps.alone_s, steps._graphs, steps._cut
    steps.stream = plain
    steps.capture()
    pieces = [*steps.pieces]
    work.unranked = steps._graphs, steps._cut
    steps.stream, steps.pieces, steps.piece_times_s, steps.alone_s, steps._graphs, steps._cut = kept
    return pieces


def free(foreground: Any, work: Any, seconds: float, **unranked: Any) -> dict[str, float]:
    """Two streams, nothing held back."""
    from burstpool.share.width import together

    found = together(foreground.steps, work.steps, seconds=seconds, **unranked)
    return compared(found.step_s[5:], found.alone_s, found.kept)


def gaps_of(which: Which, foreground: Any) -> list[Any]:
    """The foreground's pieces with the gaps of an 8-device burst plan between them.

    The plan is made for eight times the foreground's batch from the profile measured on this kind of GPU; its device
    with the median gap time is taken, and each of its gaps put where the same share of the step's compute is done.
    """
    from burstpool.share.gpu import Idle

    busy, gaps = gaps_of_plan(which)
    done = list(itertools.accumulate(foreground.steps.piece_times_s))
    scale = done[-1] / busy
    program: list[Any] = []
    waiting = collections.deque(gaps)
    for piece, done_s in enumerate(done):
        while waiting and waiting[0][0] * scale <= done_s - foreground.steps.piece_times_s[piece] / 2:
            program.append(Idle(length_s=waiting.popleft()[1] * scale))
        program.append(piece)
    program += [Idle(length_s=length_s * scale) for _, length_s in waiting]
    return program


def gaps_of_plan(which: Which) -> tuple[float, list[tuple[float, float]]]:
    """Busy seconds of the median device, and its gaps: (busy seconds before it, length)."""
    from burstpool.cluster.spec import ClusterSpec
    from burstpool.plan import burst
    from burstpool.plan.cost import CostModel
    from burstpool.plan.dataflow import dataflow
    from burstpool.profiling.profile import Profile
    from burstpool.schedule.lower import lower
    from burstpool.schedule.simulate import simulate

    profile = Profile.load(PROFILES / f"{which.name}.h200.json")
    cluster = ClusterSpec.uniform(profile.device, devices_per_node=8, num_nodes=1, link="nvlink4")
    plan = burst.plan(profile, cluster, batch=8 * which.batch, extrapolate=True, burst_limit=BURST_LIMIT)
    flow = dataflow(plan, profile)
    timeline = simulate(lower(plan, flow), CostModel(profile, cluster, extrapolate=True), flow)
    used = [device for device, busy_s in enumerate(timeline.all_busy_s()) if busy_s > 0]
    all_gaps = timeline.gaps()
    total = {device: sum(stop - start for start, stop in all_gaps[device]) for device in used}
    device = sorted(used, key=total.__getitem__)[len(used) // 2]
    gaps = []
    for start, stop in all_gaps[device]:
        before = [e for e in timeline.events if e.device == device and e.lane == "compute" and e.stop_s <= start + 1e-9]
        if stop - start > SHORTEST_GAP_S:
            gaps.append((sum(e.stop_s - e.start_s for e in before), stop - start))
    return timeline.busy_s(device), gaps


class Sharer:
    """The sharing process, from outside."""

    def __init__(self, which: Which, backgrounds: Sequence[Which]) -> None:
        self.pipe, theirs = mp.Pipe()
        arguments = (which, backgrounds, theirs)
        self.process = mp.get_context("spawn").Process(target=share, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def wait(self) -> None:
        assert self.pipe.recv() == "ready"

    def do(self, way: str, background: Which, budget: float, seconds: float, own_s: float | None) -> dict[str, Any]:
        """`own_s`: a step of the background in a process of its own, where there is one: the most it could have."""
        self.pipe.send((way, str(background), budget, seconds, own_s))
        return self.pipe.recv()


def start_mps() -> bool:
    """Whether there is an MPS server now."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return False
    os.makedirs(f"{MPS_FOLDER}/pipe", exist_ok=True)
    os.makedirs(f"{MPS_FOLDER}/log", exist_ok=True)
    environment = {**os.environ, **mps_environment()}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=False)
    asked = subprocess.run(
        ["nvidia-cuda-mps-control"], input="get_server_list\n", text=True, env=environment, check=False
    )
    return asked.returncode == 0


def mps_environment() -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": f"{MPS_FOLDER}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{MPS_FOLDER}/log"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foregrounds", default=FOREGROUNDS)
    parser.add_argument("--backgrounds", default=BACKGROUNDS)
    parser.add_argument("--pairs", default="", help="instead of all of these with all of those: vgg16:4+resnet50:32,…")
    parser.add_argument("--ways", default="ours,gaps,streams,priority,processes,mps")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--at-once", type=int, default=4, help="foregrounds whose processes fit in the GPU's memory")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pairs = [
        (Which.parse(foreground), Which.parse(background))
        for foreground, background in (
            (text.split("+") for text in args.pairs.split(","))
            if args.pairs
            else itertools.product(args.foregrounds.split(","), args.backgrounds.split(","))
        )
    ]
    foregrounds = list(dict.fromkeys(foreground for foreground, _ in pairs))
    ways, budgets = set(args.ways.split(",")), [float(text) for text in args.budgets.split(",")]
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []

    def note(foreground: Which, background: Which, way: str, figures: dict[str, Any]) -> None:
        rows.append({"foreground": str(foreground), "background": str(background), "way": way, **figures})
        short = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
        print(f"{foreground} + {background}, {way}: {short}", file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows))

    with_mps = "mps" in ways and start_mps()
    measure = functools.partial(measure_some, ways=ways, budgets=budgets, seconds=args.seconds, mps=with_mps, note=note)
    for first in range(0, len(foregrounds), args.at_once):
        some = foregrounds[first : first + args.at_once]
        measure([pair for pair in pairs if pair[0] in some])
    if with_mps:
        environment = {**os.environ, **mps_environment()}
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


def measure_some(
    pairs: Sequence[tuple[Which, Which]],
    *,
    ways: set[str],
    budgets: Sequence[float],
    seconds: float,
    mps: bool,
    note: Callable[[Which, Which, str, dict[str, Any]], None],
) -> None:
    """All ways for pairs of a few foregrounds: their processes are started at once, and ended."""
    foregrounds = list(dict.fromkeys(foreground for foreground, _ in pairs))
    backgrounds = list(dict.fromkeys(background for _, background in pairs))
    sharers = {}
    if ways & {"ours", "gaps", "streams", "priority"}:
        beside = {
            which: [background for foreground, background in pairs if foreground == which] for which in foregrounds
        }
        sharers = {str(which): Sharer(which, backgrounds) for which, backgrounds in beside.items()}
    players = {}
    if "processes" in ways:
        players = {("process", str(which)): Player(which) for which in {*foregrounds, *backgrounds}}
    if mps:
        players.update({("mps", str(which)): Player(which, mps_percent=100) for which in foregrounds})
        for percent in MPS_PERCENT:
            players.update({(percent, str(w)): Player(w, mps_percent=percent) for w in backgrounds})
    for player in (*sharers.values(), *players.values()):
        player.wait()
    for sharer in sharers.values():
        sharer.pipe.send("calibrate")
        sharer.wait()
    free, total = torch.cuda.mem_get_info()
    print(f"all processes are ready; {(total - free) >> 30} GiB in use", file=sys.stderr, flush=True)
    rates = {}
    for (kind, name), player in players.items():
        if kind in ("process", 100):
            player.go(0.5)
            rates[kind, name] = 1 / statistics.mean(player.result()["times"])
    for foreground, background in pairs:
        sharer = sharers.get(str(foreground))
        own_s = min((1 / rate for (_, name), rate in rates.items() if name == str(background)), default=None)
        if sharer is not None:
            for way in ("streams", "priority"):
                if way in ways:
                    note(foreground, background, way, sharer.do(way, background, 0, min(seconds, 0.4), own_s))
            for budget in budgets if "ours" in ways else ():
                note(
                    foreground, background, f"ours {budget:.2f}", sharer.do("ours", background, budget, seconds, own_s)
                )
            if "gaps" in ways:
                note(foreground, background, "ours 1.10, gaps", sharer.do("gaps", background, 1.10, seconds, own_s))
        if "processes" in ways:
            pair = players["process", str(foreground)], players["process", str(background)]
            own = rates["process", str(background)]
            note(foreground, background, "processes", two_processes(*pair, min(seconds, 0.4), own))
        for percent in MPS_PERCENT if mps else ():
            pair = players["mps", str(foreground)], players[percent, str(background)]
            own = rates[100, str(background)]
            note(foreground, background, f"MPS {percent}%", two_processes(*pair, min(seconds, 0.4), own))
    for process in (*sharers.values(), *players.values()):
        process.process.kill()
        process.process.join()


if __name__ == "__main__":
    main()
