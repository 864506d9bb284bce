"""Seeds: every random number of a run follows from the job's seed and from what it is drawn for.

So a resumed run needs no stored random state, and a mask does not depend on which device draws it.
"""

import hashlib

import torch


def mix(*parts: int | str) -> int:
    """A seed of 63 bits from numbers and names; the same in every process and release of Python."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_device(seed: int, on: torch.device) -> None:
    """Seeds the streams that operators on this device draw from unless told otherwise."""
    # Not torch.manual_seed: where CUDA is not in use it formats and keeps a stack trace, a third of a millisecond.
    torch.default_generator.manual_seed(seed)
    if on.type == "cuda":
        torch.cuda.default_generators[on.index].manual_seed(seed)
