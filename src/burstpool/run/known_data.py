"""Data that several jobs made alike: which of them may share each batch.

Takes jobs, one after the other. Returns each with the data of an earlier one where both are the same.
"""

import hashlib
import pickle
from dataclasses import replace
from typing import Any

from burstpool.job import Job


class KnownData:
    """Data that many trials made alike is kept once.

    Alike is what pickles to the same bytes; data that cannot be pickled is only like itself, and its batches are then
    loaded for each trial.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def shared(self, job: Job) -> Job:
        """The job with the data of an earlier one, where they are alike."""
        evaluation = job.evaluation if job.evaluation is None else self._first(job.evaluation)
        return replace(job, data=self._first(job.data), evaluation=evaluation)

    def _first(self, data: Any) -> Any:
        if any(data is known for known in self._known.values()):
            return data
        digest = _Digest()
        try:
            pickle.Pickler(digest, protocol=pickle.HIGHEST_PROTOCOL).dump(data)
        except Exception:  # whatever a user's class raises: it is no mistake not to be picklable
            return data
        return self._known.setdefault(digest.hash.digest(), data)


class _Digest:
    """A file that only remembers its hash."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=32)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(memoryview(data).cast("B"))
