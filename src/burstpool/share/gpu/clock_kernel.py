"""A kernel that looks at the GPU's own clock until a time is over. For `waiting.py`; needs Triton."""

import triton
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["time_ns"])
def _spin(time_ns):
    start = globaltimer()
    now = start
    while now - start < time_ns:
        now = globaltimer()


def wait(time_s: float) -> None:
    """On the current stream."""
    _spin[(1,)](round(time_s * 1e9), num_warps=1)
