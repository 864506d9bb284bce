"""Memory of burst plans: which widths each layer may have so that no device is ever asked for more than it has.

Takes CostModel, Widths, parameter bytes. Returns a table. Counts parameters, gradients and optimizer state of all
layers on every device, and what layers keep for their backward where the profile says so. Ignores what is received from
other devices and what kernels need while they run.
"""

import numpy as np
import numpy.typing as npt

from burstpool.errors import PlanError
from burstpool.plan.cost import CostModel, Floats
from burstpool.plan.widths import Widths
from burstpool.profiling.interpolation import values_at


def fitting_widths(cost: CostModel, widths: Widths, parameter_bytes: Floats) -> npt.NDArray[np.bool_]:
    """Layers × widths that any plan may combine without more memory than a device has.

    The first device of each type has all layers in the worst case. A layer may keep at most so many bytes on it that
    all of them together fit next to the parameters; layers that keep little may then be as narrow as they like.
    """
    allowed = np.ones((len(parameter_bytes), len(widths.values)), dtype=bool)
    seen = set()
    for rank, device in enumerate(widths.devices):
        if cost.device_type(device) in seen:
            continue
        seen.add(cost.device_type(device))
        room = cost.memory_bytes(device) - (2 + cost.optimizer_slots) * parameter_bytes.sum()
        kept = _kept_bytes(cost, device, widths.counts[:, rank])
        if room < 0 or kept.min(axis=1).sum() > room:
            raise PlanError(
                f"the model does not fit on device {device} ({cost.device_type(device)}) at any width: its parameters, "
                f"gradients and activations need more than {cost.memory_bytes(device) / 2**30:.3g} GiB; "
                "use a smaller batch, or a pipeline"
            )
        allowed &= kept <= _most_a_layer(kept, room)[:, None]
    return allowed


def _kept_bytes(cost: CostModel, device: int, samples: npt.NDArray[np.int32]) -> Floats:
    """Layers × widths: what a layer keeps for its backward; 0 where the profile does not say."""
    profile = cost.profile(cost.device_type(device))
    found = np.zeros((len(profile.layers), len(samples)))
    known = [place for place, layer in enumerate(profile.layers) if layer.activation_bytes]
    used = np.flatnonzero(samples)
    if known and len(used):
        tables = np.array([list(profile.layers[place].activation_bytes.values()) for place in known], dtype=np.float64)
        wanted = samples[used].tolist()
        found[np.ix_(np.array(known), used)] = values_at(tables, profile.batches, wanted, extrapolate=cost.extrapolate)
    return found


def _most_a_layer(kept: Floats, room: float) -> Floats:
    """Layer → the most it may keep: one limit for all, or its own least where that is more."""
    least, limits = kept.min(axis=1), np.unique(kept)

    def bound(place: int) -> Floats:
        capped = np.where(kept <= limits[place], kept, -1.0).max(axis=1)
        return np.asarray(np.maximum(capped, least))

    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bound(middle).sum() <= room else (low, middle - 1)
    return bound(low)
