"""Even plans: plain data parallelism, for a run that nobody planned.

Every block runs on all devices, each with as even a share of the samples as there is. Blocks are cut so that their
gradients are reduced in pieces of about `BUCKET_BYTES` while the backward of earlier blocks goes on, as DDP does.
"""

from burstpool.errors import PlanError
from burstpool.model.graph import LayerGraph
from burstpool.plan.plan import Plan, PlannedBlock, even_shares

BUCKET_BYTES = 8 << 20
"""Gradients that travel together."""


def even_plan(graph: LayerGraph, *, num_devices: int, batch: int, name: str, bucket_bytes: int = BUCKET_BYTES) -> Plan:
    """Data parallelism over devices 0 to `num_devices - 1`. Pure."""
    if num_devices < 1:
        raise PlanError(f"num_devices={num_devices} must be at least 1")
    shares = even_shares(batch, tuple(range(num_devices)))
    blocks: list[list[str]] = [[]]
    weight = 0
    for layer in reversed(graph.layers):  # from the end, where gradients are there first
        if weight >= bucket_bytes:
            blocks.append([])
            weight = 0
        blocks[-1].append(layer.name)
        weight += layer.parameter_bytes
    return Plan(
        model=name or graph.model,
        strategy="data",
        num_devices=num_devices,
        batch=batch,
        blocks=tuple(
            PlannedBlock(name=layers[-1], layers=tuple(reversed(layers)), shares=shares) for layers in reversed(blocks)
        ),
    )
