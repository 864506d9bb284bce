"""Sharing on CPU workers: the kernel takes a core away from a process of the lowest priority at once; what is left to
control (`gates/`) is what priority does not: caches, memory bandwidth, shared cores."""

from collections.abc import Callable

from burstpool.share.base import ShareOutcome, ShareProgress, ShareRequest
from burstpool.share.gates.workers import share_among_workers


def share_on_cpu(request: ShareRequest, *, observer: Callable[[ShareProgress], None] | None = None) -> ShareOutcome:
    """See `ShareFunction`."""
    return share_among_workers(request, observer=observer)
