"""Memory of a schedule: the most each device holds at once.

Takes Schedule, CostModel, Dataflow. Counts what a step must keep: parameters with their gradients and the optimizer's
state, what each forward keeps until its backward (as the profile measured it), and values received from other devices
until all blocks that take them have run backward. Ignores workspaces of kernels, buffers of reductions, fragmentation
and the loss: leave room for them.
"""

from collections import defaultdict

from burstpool.errors import ScheduleError
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import Dataflow
from burstpool.schedule.actions import Action, Kind, Schedule


def check_memory(schedule: Schedule, cost: CostModel, flow: Dataflow) -> None:
    """Raises ScheduleError where a device's peak is more than it has."""
    for device, peak in enumerate(peak_memory_bytes(schedule, cost, flow)):
        has = cost.memory_bytes(device)
        if peak > has:
            need = f"device {device} would need {peak / 2**30:.3g} GiB and has {has / 2**30:.3g} GiB"
            raise ScheduleError(f"{need}; use more devices, or a smaller batch")


def peak_memory_bytes(schedule: Schedule, cost: CostModel, flow: Dataflow) -> tuple[int, ...]:
    """Device → the most it holds at once."""
    return tuple(_peak(device, actions, cost, flow) for device, actions in enumerate(schedule.devices))


def _peak(device: int, actions: tuple[Action, ...], cost: CostModel, flow: Dataflow) -> int:
    copies = 2 + cost.optimizer_slots
    held = copies * sum(flow.blocks[a.block].parameter_bytes for a in actions if a.kind is Kind.STEP)
    here = {action.block for action in actions if action.kind is Kind.FORWARD}
    received: dict[tuple[str, int], int] = defaultdict(int)
    takers = {name: {t for t in value.takers if t in here} for name, value in flow.values.items()}
    waiting: dict[tuple[str, int], set[str]] = {}
    peak = held
    for action in actions:
        if action.kind is Kind.RECEIVE and not action.gradient:
            key = (action.value, action.minibatch)
            size = flow.values[action.value].bytes_per_sample * (action.stop - action.start)
            held += size
            received[key] += size
            waiting.setdefault(key, set(takers[action.value]))
        elif action.kind in (Kind.FORWARD, Kind.BACKWARD):
            layers = flow.blocks[action.block].layers
            kept = cost.activation_bytes(layers, device, action.stop - action.start)
            held += kept if action.kind is Kind.FORWARD else 0
            peak = max(peak, held)
            if action.kind is Kind.BACKWARD:
                held -= kept
                for key in [(name, action.minibatch) for name in flow.blocks[action.block].takes]:
                    if key in waiting:
                        waiting[key].discard(action.block)
                        held -= 0 if waiting[key] else received.pop(key, 0)
        peak = max(peak, held)
    return peak
