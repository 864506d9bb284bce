"""Memory that an array keeps for large gradients: used again when nothing refers to it, never before."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from burstpool.fusion import fuse
from burstpool.fusion.array import FusedArray
from burstpool.fusion.memory import SMALLEST_BYTES, KeptMemory

LARGE = (2, SMALLEST_BYTES // 8)


def test_a_block_is_handed_out_again_when_its_tensor_is_gone() -> None:
    memory = KeptMemory()
    first = memory.empty(LARGE, torch.float32)
    address = first.data_ptr()
    del first
    assert memory.empty(LARGE, torch.float32).data_ptr() == address
    assert memory.num_bytes == SMALLEST_BYTES


def test_a_block_stays_taken_while_a_view_of_its_tensor_is_alive() -> None:
    memory = KeptMemory()
    first = memory.empty(LARGE, torch.float32).fill_(1.0)
    part = first.detach()[1, 3:5]
    del first
    memory.empty(LARGE, torch.float32).fill_(2.0)
    assert part.tolist() == [1.0, 1.0]


def test_what_is_forgotten_stays_with_those_who_use_it() -> None:
    memory = KeptMemory()
    kept = memory.empty(LARGE, torch.float32).fill_(1.0)
    memory.forget()
    assert memory.num_bytes == 0
    memory.empty(LARGE, torch.float32).fill_(2.0)
    assert kept.eq(1.0).all()


def test_small_tensors_are_not_kept() -> None:
    memory = KeptMemory()
    memory.empty((3, 4), torch.float64)
    assert memory.num_bytes == 0


def wide_array(shared: bool) -> tuple[FusedArray, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 300) if shared else torch.randn(3, 4, 300)
    return fuse([nn.Linear(300, 500) for _ in range(3)], x if shared else x[0]), x


def gradients(array: FusedArray, x: Tensor) -> Tensor:
    array.losses(x, lambda out: out.square().mean(), per_member=x.dim() == 3).sum().backward()
    found = array.state.parameters["weight"].grad
    assert found is not None
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_lie_in_the_same_memory_step_after_step_and_are_torchs_own(shared: bool) -> None:
    array, x = wide_array(shared)
    optimizer = array.optimizer(torch.optim.SGD, lr=[0.1, 0.2, 0.3])
    addresses = set()
    for _ in range(3):
        alone = [array.member(i).module() for i in range(3)]
        for member, model in enumerate(alone):
            model(x if shared else x[member]).square().mean().backward()
        found = gradients(array, x)
        torch.testing.assert_close(found, torch.stack([model.weight.grad for model in alone]))  # type: ignore[misc]
        addresses.add(found.data_ptr())
        optimizer.step()
        optimizer.zero_grad()
        del found
    assert len(addresses) == 1


def test_a_gradient_that_the_user_holds_is_not_written_over() -> None:
    array, x = wide_array(shared=True)
    held = gradients(array, x)
    copy = held.clone()
    array.state.parameters["weight"].grad = None
    gradients(array, 2 * x)
    assert torch.equal(held, copy)


def test_gradients_add_up_over_two_backward_passes() -> None:
    array, x = wide_array(shared=True)
    once = gradients(array, x).clone()
    torch.testing.assert_close(gradients(array, x), 2 * once)


def test_gradients_of_gradients_are_had_with_many_weights() -> None:
    x = torch.randn(4, 300, dtype=torch.float64)
    array = fuse([nn.Linear(300, 500).double() for _ in range(3)], x)
    weight = array.state.parameters["weight"]
    losses = array.losses(x, lambda out: out.pow(3).mean())
    (first,) = torch.autograd.grad(losses.sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    model = array.member(1).module()
    (theirs,) = torch.autograd.grad(model(x).pow(3).mean(), model.weight, create_graph=True)
    (expected,) = torch.autograd.grad(theirs.square().sum(), model.weight)
    torch.testing.assert_close(second[1], expected)


def test_memory_of_members_that_left_is_given_back() -> None:
    array, x = wide_array(shared=True)
    gradients(array, x)
    array.drop(0)
    gradients(array, x)
    assert array._memory is not None
    assert array._memory.num_bytes == 2 * 300 * 500 * 4


def _faults_of_ten_steps() -> int:
    """In a process of its own, where large blocks go back to the system whenever they are freed."""
    array, x = wide_array(shared=True)
    optimizer = array.optimizer(torch.optim.SGD, lr=0.1)

    def step() -> None:
        gradients(array, x)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc to give memory back")
def test_a_step_meets_no_page_faults_for_its_gradients_however_the_process_allocates() -> None:
    # glibc's own threshold moves with what was freed before; named, it stays, and blocks go back at once.
    path = [str(Path(__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {path}; import test_fusion_memory as t; print(t._faults_of_ten_steps())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
        check=True,
    )
    pages = 3 * 300 * 500 * 4 // 4096
    assert int(done.stdout) < pages  # of ten steps; a block anew at each step is ten times as many
