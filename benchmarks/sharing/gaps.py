"""The gaps of a real burst plan, to be replayed in the foreground of one GPU."""

import collections
import itertools
from pathlib import Path
from typing import Any

from jobs import Which

BURST_LIMIT = 1.5
"""Of the plan whose gaps are replayed."""
SHORTEST_GAP_S = 5e-5
PROFILES = Path(__file__).parents[1] / "burst" / "profiles"


def gaps_of(which: Which, foreground: Any) -> list[Any]:
    """The foreground's pieces with the gaps of an 8-device burst plan between them.

    The plan is made for eight times the foreground's batch from the profile measured on this kind of GPU; its device
    with the median gap time is taken, and each of its gaps put where the same share of the step's compute is done.
    """
    from burstpool.share.gpu.loop import Idle

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
