"""The order of the data, and what of it a device loads."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_cases import make_plan
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from burstpool.errors import JobError
from burstpool.job import Job, load_job
from burstpool.run.loading import Loader, needed_ranges
from burstpool.run.order import DataOrder, Position
from burstpool.run.setup import trace_job


@given(length=st.integers(1, 50), batch=st.integers(1, 50), seed=st.integers(0, 5))
def test_an_epoch_takes_every_sample_at_most_once_and_drops_less_than_a_batch(
    length: int, batch: int, seed: int
) -> None:
    if batch > length:
        with pytest.raises(JobError, match="pass a smaller batch"):
            DataOrder(length, samples_per_step=batch, seed=seed)
        return
    order = DataOrder(length, samples_per_step=batch, seed=seed)
    steps = length // batch
    first = np.concatenate([order.take() for _ in range(steps)])
    assert len(set(first.tolist())) == steps * batch
    assert order.position == Position(epoch=0, sample=steps * batch)
    order.take()
    assert order.position == Position(epoch=1, sample=batch)


@given(done=st.integers(0, 30))
def test_the_order_can_be_taken_up_at_any_step(done: int) -> None:
    whole = DataOrder(23, samples_per_step=4, seed=1)
    taken = [whole.take().tolist() for _ in range(done + 10)]
    first = DataOrder(23, samples_per_step=4, seed=1)
    for _ in range(done):
        first.take()
    again = DataOrder(23, samples_per_step=4, seed=1, position=first.position)
    assert [again.take().tolist() for _ in range(10)] == taken[done:]


def test_epochs_and_seeds_differ() -> None:
    orders = [DataOrder(50, samples_per_step=50, seed=seed) for seed in (0, 1)]
    epochs = [tuple(order.take().tolist()) for order in orders for _ in range(2)]
    assert len(set(epochs)) == 4


def test_a_device_loads_what_its_first_and_last_blocks_take() -> None:
    graph = trace_job(load_job("zoo:tiny_vgg")).graph
    plan = make_plan(graph, [(0, [0, 1]), (3, [2]), (6, [1, 3])], num_devices=5, batch=9)
    assert needed_ranges(plan, graph, 0) == ((0, 5),)
    assert needed_ranges(plan, graph, 1) == ((0, 9),)  # images 5:9 for the first block, targets 0:5 for the last
    assert needed_ranges(plan, graph, 2) == ()
    assert needed_ranges(plan, graph, 3) == ((5, 9),)
    assert needed_ranges(plan, graph, 4) == ()


class Noisy(Dataset[Any]):
    """Samples that draw from every global stream of random numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        noise = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *noise]), 0


def test_random_data_is_the_same_on_any_device_and_after_a_resume() -> None:
    job = Job(model=partial(nn.Linear, 4, 2), loss=F.cross_entropy, data=Noisy(), optimizer=torch.optim.SGD, batch=6)
    traced = trace_job(job)
    plan = make_plan(traced.graph, [(0, [0, 1])], num_devices=2, batch=6)
    one = make_plan(traced.graph, [(0, [0])], num_devices=1, batch=6)
    cpu = torch.device("cpu")
    name = traced.graph.inputs[0].name

    def load(loader: Loader) -> torch.Tensor:
        return torch.cat([part.values[name] for parts in loader.load() for part in parts])

    alone = Loader(job, traced, one, device=0, on=cpu)
    loaders = [Loader(job, traced, plan, device=device, on=cpu) for device in (0, 1)]
    for _ in range(4):
        position = alone.position
        whole = load(alone)
        assert len(set(whole[:, 1].tolist())) == 6
        assert torch.equal(torch.cat([load(loader) for loader in loaders]), whole)
    alone.start_at(position)
    assert torch.equal(load(alone), whole)


def test_data_without_random_numbers_is_not_seeded() -> None:
    job = load_job("zoo:tiny_mlp")
    traced = trace_job(job)
    plan = make_plan(traced.graph, [(0, [0])], num_devices=1, batch=4)
    loader = Loader(job, traced, plan, device=0, on=torch.device("cpu"))
    before = torch.get_rng_state()
    loader.load()
    assert torch.equal(torch.get_rng_state(), before)
