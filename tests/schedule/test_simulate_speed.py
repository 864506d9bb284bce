"""How long the simulator takes; apart from its other tests, as this one has the machine to itself."""

import heapq
import time
from collections.abc import Callable

import pytest
from schedule_cases import block, on, plan

from burstpool.cluster.spec import ClusterSpec
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.report.timeline import Timeline
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate

pytestmark = pytest.mark.alone

NUM_EVENTS = 400_000


def test_a_thousand_devices_with_a_hundred_blocks_take_seconds() -> None:
    names = [f"l{i}" for i in range(100)]
    layers = tuple(
        LayerProfile(
            name=name,
            inputs=(names[i - 1] if i else "input",),
            parameter_bytes=10**6,
            output_bytes_per_sample=10**4,
            forward_s={1: 1e-3, 2: 2e-3},
            backward_s={1: 2e-3, 2: 4e-3},
        )
        for i, name in enumerate(names)
    )
    measured = Profile(model="m", device="A100", source="made up", layers=layers)
    where = ClusterSpec.uniform("A100", devices_per_node=8, num_nodes=125, link="nvlink3", network="infiniband-hdr")
    case = plan(*(block(name, on(1500, *range(1000))) for name in names))
    cost, flow = CostModel(measured, where), dataflow(case, measured)
    schedule = lower(case, flow)
    taken: list[tuple[float, float]] = []
    timelines: list[Timeline] = []
    for _ in range(3):  # a slow moment of the machine is not to decide
        usual_s = cpu_seconds(heap_of_events)
        taken_s = cpu_seconds(lambda: timelines.append(simulate(schedule, cost, flow)))
        assert len(timelines.pop().events) == NUM_EVENTS
        taken.append((taken_s, usual_s))
        # The bar is 2 s and it takes about 1 s alone on one core. A core that others share has taken 6.5 s; whatever it
        # is slow by, a heap of as many events has taken 2.6 s then, and half a second else.
        if taken_s < 2 or taken_s < 4 * usual_s:
            return
    pytest.fail(f"seconds, and those of a heap of as many events: {taken}")


def cpu_seconds(work: Callable[[], object]) -> float:
    """Other processes' turns do not count."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def heap_of_events() -> None:
    """What no simulator of so many events does without."""
    heap: list[tuple[int, int]] = []
    made = {}
    for i in range(NUM_EVENTS):
        heapq.heappush(heap, ((i * 7919) % NUM_EVENTS, i))
        made[i % 1000, i // 1000] = (i, float(i), float(i + 1))
    while heap:
        heapq.heappop(heap)
