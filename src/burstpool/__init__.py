"""Burstpool gets the most training out of a pool of GPUs.

The names below are the public API. They are loaded when first used: importing burstpool imports neither torch
nor ray, so that the command line answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from burstpool.version import __version__ as __version__

if TYPE_CHECKING:
    from burstpool.cluster.spec import ClusterSpec
    from burstpool.errors import BurstpoolError
    from burstpool.fusion.array import FusedArray, fuse
    from burstpool.job import Job, load_job
    from burstpool.model.graph import LayerGraph
    from burstpool.model.trace import TracedModel, trace
    from burstpool.profiling.estimate import estimate
    from burstpool.profiling.measure import profile
    from burstpool.profiling.profile import Profile
    from burstpool.sweeping.sweep import sweep

_HOMES = {
    "BurstpoolError": "burstpool.errors",
    "ClusterSpec": "burstpool.cluster.spec",
    "FusedArray": "burstpool.fusion.array",
    "Job": "burstpool.job",
    "LayerGraph": "burstpool.model.graph",
    "Profile": "burstpool.profiling.profile",
    "TracedModel": "burstpool.model.trace",
    "estimate": "burstpool.profiling.estimate",
    "fuse": "burstpool.fusion.array",
    "load_job": "burstpool.job",
    "profile": "burstpool.profiling.measure",
    "sweep": "burstpool.sweeping.sweep",
    "trace": "burstpool.model.trace",
}

__all__ = [
    "BurstpoolError",
    "ClusterSpec",
    "FusedArray",
    "Job",
    "LayerGraph",
    "Profile",
    "TracedModel",
    "estimate",
    "fuse",
    "load_job",
    "profile",
    "sweep",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'burstpool' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
