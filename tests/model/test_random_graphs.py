"""Random models cut at random places train as if they had not been cut."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from burstpool import trace
from burstpool.model.check import check_step

WIDTH = 4
KINDS = ("linear", "relu_", "norm", "dropout", "add", "mul", "cat", "add_", "tanh")


class RandomGraph(nn.Module):
    """Each step takes one or two earlier values; everything nobody took is summed at the end."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(self._part(kind) for kind, _, _ in steps)

    @staticmethod
    def _part(kind: str) -> nn.Module:
        parts = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "norm": lambda: nn.BatchNorm1d(WIDTH),
            "dropout": lambda: nn.Dropout(0.5),
            "relu_": lambda: nn.ReLU(inplace=True),
            "cat": lambda: nn.Linear(2 * WIDTH, WIDTH),
        }
        return parts.get(kind, nn.Identity)()

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for (kind, first, second), part in zip(self.steps, self.parts, strict=True):
            a, b = values[first % len(values)], values[second % len(values)]
            if kind == "cat":
                new = part(torch.cat([a, b], dim=1))
            elif kind == "add":
                new = a + b
            elif kind == "mul":
                new = a * torch.sigmoid(b)
            elif kind == "add_":
                new = a.clone()
                new += b
            elif kind == "tanh":
                new = torch.tanh(a)
            elif kind == "relu_":
                new = part(a * 1.5)
            else:
                new = part(a)
            values.append(new)
        return torch.stack(values).sum(0)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=9),
    data=st.data(),
)
def test_random_graphs_cut_at_random_places_give_the_same_step(
    steps: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    torch.manual_seed(0)
    model, example = RandomGraph(steps).double(), torch.randn(4, WIDTH).double()
    traced = trace(model, example)
    count = len(traced.layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    found = check_step(traced, example, batch=data.draw(st.integers(2, 7)), cuts=cuts)
    # Values that several blocks take have their gradients added in another order than autograd's.
    assert found.within(1e-12), (found, cuts, traced.graph)
