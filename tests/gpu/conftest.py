"""For all tests on a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from burstpool.share.gpu.loop import alone_in_a_group


@pytest.fixture
def control() -> Iterator[dist.ProcessGroup]:
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    with alone_in_a_group() as group:
        yield group
    torch.backends.cudnn.deterministic = before
