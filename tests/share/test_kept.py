"""What an optimizer on the host counts is the same after a rehearsal, and so are its tensors."""

from collections.abc import Callable
from typing import Any

import torch

from burstpool.share.gpu.kept import counts_kept


class Counting(torch.optim.Optimizer):
    """Counts in plain numbers, as many that are not torch's do, and makes its tensors anew in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "seen": []})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["seen"].append(group["k"])
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                parameter.sub_(group["lr"] * state["mean"])


def test_steps_that_are_not_kept_move_no_counter() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = Counting([parameter])
    optimizer.step()
    [state], [group] = optimizer.state.values(), optimizer.param_groups
    mean = state["mean"]
    with counts_kept(optimizer):
        optimizer.step()
        optimizer.step()
        assert state["step"] == group["k"] == 3
    assert (state["step"], group["k"], group["seen"]) == (1, 1, [1])
    assert state["mean"] is mean
    assert optimizer.param_groups[0]["params"][0] is parameter
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 2


def test_a_job_without_an_optimizer_has_nothing_to_keep() -> None:
    with counts_kept(None):
        pass
