"""What a step that ran out of memory has changed is put back, or it is said that it cannot be."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from burstpool.job import load_job
from burstpool.run.even import even_plan
from burstpool.run.executor import Executor
from burstpool.run.loading import Loader
from burstpool.run.options import RunOptions
from burstpool.run.setup import Seat, set_up, trace_job
from burstpool.run.torchrun import Silent
from burstpool.schedule.lower import lower
from burstpool.share.gpu.graph_steps import _Before
from burstpool.share.gpu.loop import alone_in_a_group
from burstpool.share.gpu.moving import Away, collector_at_rest, give_back, or_else, ran_out

JOBS = str(Path(__file__).with_name("share_jobs.py"))


@pytest.fixture
def control() -> Iterator[dist.ProcessGroup]:
    with alone_in_a_group() as group:
        yield group


def at_work(control: dist.ProcessGroup) -> tuple[Executor, Loader]:
    job = load_job(JOBS)
    graph = trace_job(job).graph
    plan = even_plan(graph, num_devices=1, batch=job.batch, name=job.name)
    seat = Seat(device=0, on=torch.device("cpu"), backend="gloo", control=control, doing=Silent())
    return set_up(job, plan, lower(plan, graph), RunOptions(), seat)


def test_a_step_that_fails_before_its_change_can_be_done_again(control: dist.ProcessGroup) -> None:
    executor, loader = at_work(control)
    executor.run(0, loader.load())
    before, buffers = _Before(executor), dict(executor.part.traced.model.named_buffers())
    samples = loader.load()
    before.note()
    old = {name: buffer.clone() for name, buffer in buffers.items()}
    apply = executor.update.apply

    def fail(keys: object) -> None:
        raise torch.OutOfMemoryError("no memory for the change")

    executor.update.apply = fail  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        executor.run(1, samples)
    executor.update.apply = apply  # type: ignore[method-assign]
    assert any(not torch.equal(old[name], buffer) for name, buffer in buffers.items())  # batch norm has seen samples
    executor.update.forget()
    assert before.restore()
    assert all(torch.equal(old[name], buffer) for name, buffer in buffers.items())
    losses = [executor.run(1, samples), executor.run(2, loader.load())]
    other, again = at_work(control)
    expected = [other.run(step, again.load()) for step in range(3)]
    assert losses == expected[1:]


def test_a_step_that_has_changed_parameters_is_not_taken_back(control: dist.ProcessGroup) -> None:
    executor, loader = at_work(control)
    executor.run(0, loader.load())
    before = _Before(executor)
    before.note()
    executor.run(1, loader.load())
    assert not before.restore()
    before.forget()  # it has ended: nothing is to be put back before the next one
    changed = [parameter.clone() for parameter in executor.part.traced.model.parameters()]
    assert before.restore()
    assert all(map(torch.equal, changed, executor.part.traced.model.parameters()))


def test_what_an_exception_holds_on_to_is_let_go_before_anything_is_undone() -> None:
    class Big:
        alive = 0

        def __init__(self) -> None:
            Big.alive += 1

        def __del__(self) -> None:
            Big.alive -= 1

    def fill() -> None:
        big = Big()
        raise torch.OutOfMemoryError(f"no room beside {type(big).__name__}")

    def wrapped() -> None:
        try:
            fill()
        except torch.OutOfMemoryError as error:
            raise ValueError("could not") from error

    with pytest.raises(ValueError, match="could not") as found:
        wrapped()
    assert ran_out(found.value)
    assert not ran_out(ValueError("could not"))
    del found
    seen: list[int] = []
    with pytest.raises(ValueError, match="could not"), or_else(lambda: seen.append(Big.alive)):
        wrapped()
    assert seen == [0]


class Numbers:
    """What `Away` needs of a tensor, on a GPU that is not there; `room` of them fit."""

    room = 3
    there: list["Numbers"] = []  # noqa: RUF012

    def __init__(self, where: str) -> None:
        self.device = torch.device(where)
        Numbers.there += [self] if where == "cuda" else []

    @property
    def data(self) -> "Numbers":
        return self

    @data.setter
    def data(self, other: "Numbers") -> None: ...

    def cpu(self) -> "Numbers":
        self.device = torch.device("cpu")
        Numbers.there.remove(self)
        return self

    def to(self, device: torch.device) -> "Numbers":
        if len(Numbers.there) >= Numbers.room:
            raise torch.OutOfMemoryError("no room")
        self.device = device
        Numbers.there.append(self)
        return self


def test_tensors_of_the_gpu_go_and_come_back_and_those_of_the_host_stay() -> None:
    cuda = torch.device("cuda", 0)
    host, *mine = [Numbers("cpu"), *(Numbers("cuda") for _ in range(3))]
    away, all_of_them = Away(), [host, *mine, mine[0]]  # a tied one stands there twice
    away.take(all_of_them)  # type: ignore[arg-type]
    assert not Numbers.there
    other = Numbers("cuda")
    with pytest.raises(torch.OutOfMemoryError), or_else(lambda: away.take(all_of_them)):  # type: ignore[arg-type]
        away.bring_back(cuda)
    assert Numbers.there == [other]  # those that had come were taken out again
    other.cpu()
    away.bring_back(cuda)
    assert Numbers.there == mine
    assert host.device.type == "cpu"


class Graph:
    """Something that refers to itself, as what is captured does."""

    def __init__(self) -> None:
        self.itself = self


def test_what_leaves_is_collected_although_the_collector_rests() -> None:
    graph = Graph()
    seen = weakref.ref(graph)
    with collector_at_rest():
        del graph
        gc.collect()
        assert seen() is not None
        give_back()
        assert seen() is None
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
