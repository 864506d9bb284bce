"""Ranges of the zoo's hyper-parameters, as annotations that `--set` is checked against."""

from typing import Annotated

from pydantic import Field

from burstpool.errors import JobError

Size = Annotated[int, Field(ge=1)]
"""Channels, layers, classes, tokens, samples: a number of things, at least one."""
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Learning rates and weight decay."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""Dropout probability or momentum."""
Seed = Annotated[int, Field(ge=0)]
"""Seeds the weights, the order of the data and the steps' random numbers; the data itself is the same."""


def check_heads(width: int, heads: int) -> None:
    """Attention splits the width evenly over its heads."""
    if width % heads:
        raise JobError(f"width={width} cannot be split over heads={heads}; pass a multiple of {heads}")
