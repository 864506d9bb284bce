"""The machine's memory runs short: which background leaves, and when it comes back."""

from burstpool.share.memory import MemoryWatch


class _Job:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_here = True

    def evict(self, reason: str) -> bool:
        self.calls.append(f"evict: {reason}")
        return True

    def readmit(self) -> None:
        self.calls.append("readmit")
        self.is_here = True


def test_memory_that_runs_short_evicts_one_after_another_and_lets_them_come_back() -> None:
    free, (first, last, ended) = [50 << 20], (_Job(), _Job(), _Job())
    ended.is_here = False
    watch = MemoryWatch([first, last, ended], memory=lambda: (free[0], 100 << 20))
    watch.look()
    watch.look()  # the last is still leaving
    assert not first.calls
    assert not ended.calls
    assert last.calls == ["evict: 50 MiB of memory were free, fewer than 100 MiB"]
    last.is_here = False
    watch.look()
    assert len(first.calls) == 1
    first.is_here = False
    free[0] = 150 << 20  # not yet: coming back would take it below again
    watch.look()
    assert first.calls[-1] != "readmit"
    free[0] = 300 << 20
    watch.look()
    watch.look()
    assert first.calls[-1] == last.calls[-1] == "readmit"


def test_a_job_comes_back_only_when_what_its_leaving_freed_is_there_again() -> None:
    free, job = [50], _Job()
    watch = MemoryWatch([job], memory=lambda: (free[0], 100))
    watch.look()
    job.is_here, free[0] = False, 550  # it held 500
    watch.look()
    assert len(job.calls) == 1
    free[0] = 601
    watch.look()
    assert job.calls[-1] == "readmit"
