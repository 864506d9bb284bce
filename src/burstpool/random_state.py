"""torch's random state, kept and seeded on all devices that are in use, and on no others.

A GPU that nobody uses in this process stays so: to read or seed its random state would make a context there, which
takes half a gigabyte of its memory and turns from other processes, and fails where the GPU is full. Jobs on CPUs want
none of that.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What is drawn or seeded inside leaves what is drawn after as it would have been."""
    import torch

    in_use = gpus_in_use()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if in_use else ()):
            yield
    finally:
        if not in_use and gpus_in_use():  # since inside: back to where it began
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


def seed_all(seed: int) -> None:
    """Seeds what operators draw from on the CPU, and on GPUs that are in use."""
    import torch

    torch.default_generator.manual_seed(seed)
    if gpus_in_use():
        torch.cuda.manual_seed_all(seed)


def gpus_in_use() -> bool:
    """Whether this process has begun to use GPUs."""
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
