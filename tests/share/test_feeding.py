"""Feeders give every batch once, in order, whatever happens to the process that loads them."""

import dataclasses
import os
import signal
import time
from typing import Any

import pytest
import torch

from burstpool.errors import ShareError
from burstpool.job import Job, load_job
from burstpool.run.loading import Batch, Batches
from burstpool.run.order import Position
from burstpool.run.worker import JobSource
from burstpool.share.gpu.feeding import Feeder

SOURCE = JobSource(source="zoo:tiny_mlp", settings={})


def taken(feeder: Feeder) -> Batch:
    deadline = time.monotonic() + 300
    while (batch := feeder.take()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    [[found]] = batch
    found = Batch(found.start, found.stop, found.inputs.clone(), found.target.clone())
    feeder.used(None)
    return found


def take_all(feeder: Feeder, got: list[Batch]) -> None:
    for _ in range(20):
        got.append(taken(feeder))


def expected(job: Job, steps: int) -> list[Batch]:
    batches = Batches(job, ((0, job.batch),), batch=job.batch)
    return [batches.load()[0][0] for _ in range(steps)]


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.target, b.target)


def test_batches_come_in_order_also_after_the_process_was_killed() -> None:
    job = load_job("zoo:tiny_mlp")
    feeder = Feeder(SOURCE, job)
    got = [taken(feeder) for _ in range(5)]
    os.kill(feeder._process.pid, signal.SIGKILL)
    with pytest.raises(ShareError, match="was killed by SIGKILL"):
        take_all(feeder, got)
    feeder.restart()
    got += [taken(feeder) for _ in range(9 - len(got))]
    feeder.close()
    assert all(same(a, b) for a, b in zip(got, expected(job, 9), strict=True))
    assert feeder.restarts == 1


def test_a_feeder_starts_where_it_is_told() -> None:
    job = load_job("zoo:tiny_mlp")
    batches = Batches(job, ((0, job.batch),), batch=job.batch)
    for _ in range(3):
        batches.skip()
    feeder = Feeder(SOURCE, job, position=batches.position)
    assert same(taken(feeder), expected(job, 4)[3])
    assert feeder.position != Position()
    feeder.close()


class Faulty(torch.utils.data.Dataset[Any]):
    def __init__(self, data: Any, fault: str) -> None:
        self.data, self.fault, self.count = data, fault, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        if self.count > 100 and self.fault == "raise":
            raise ValueError("a broken file")
        if self.count > 100 and self.fault == "hang":
            time.sleep(3600)
        if self.count > 100 and self.fault == "allocate":
            self.eaten = [torch.ones(1 << 24) for _ in range(10_000)]
        return self.data[index]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("raise", "a broken file"), ("hang", "given nothing for 1 s"), ("allocate", "failed: .*(alloc|emory)")],
)
def test_a_data_set_that_fails_is_told_apart(fault: str, message: str) -> None:
    job = load_job("zoo:tiny_mlp")
    job = dataclasses.replace(job, batch=16, data=Faulty(job.data, fault))
    # Filling half a gigabyte may take a second, too.
    feeder = Feeder(job, job, hang_s=1.0 if fault == "hang" else 20.0, memory_bytes=1 << 29)
    with pytest.raises(ShareError, match=message):
        take_all(feeder, [])
    feeder.close()
