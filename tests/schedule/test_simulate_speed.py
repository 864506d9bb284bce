"""How long the simulator takes; apart from its other tests, as this one has the machine to itself."""

import time

import pytest
from schedule_cases import block, on, plan

from burstpool.cluster.spec import ClusterSpec
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate


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
    taken_s = []
    for _ in range(3):  # a slow moment of the machine is not to decide
        begin = time.process_time()  # other processes' turns do not count
        timeline = simulate(schedule, cost, flow)
        taken_s.append(time.process_time() - begin)
        assert len(timeline.events) == 400_000
        # The bar is 2 s and it takes about 1 s alone on one core; the rest is for a core that others share.
        if taken_s[-1] < 6:
            return
    pytest.fail(f"seconds: {taken_s}")
