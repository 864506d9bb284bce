"""What is refused, and what is said, before a run starts."""

import logging
from functools import partial

import pytest
import torch
from run_cases import make_plan
from run_models import dropout_job
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.data import digits
from burstpool.errors import RunError
from burstpool.job import Job
from burstpool.model.code import Fold, Site
from burstpool.model.graph import Layer
from burstpool.plan.plan import Plan
from burstpool.run.dropout import Masks
from burstpool.run.groups import check_orders
from burstpool.run.moment import Moment
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.substitutes import Substitutes
from burstpool.schedule.actions import Action, Kind, Schedule


class Mixing(nn.Module):
    """Takes a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(images)
        return x - x.mean(0)


class Recurrent(nn.Module):
    """Dropout inside one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.lstm(rows)[0][:, -1])


def _job(model: type[nn.Module], form: str) -> Job:
    return Job(model=model, loss=F.cross_entropy, data=digits(form=form), optimizer=partial(torch.optim.SGD, lr=0.1))  # type: ignore[arg-type]


def _substitutes(plan: Plan, **options: object) -> Substitutes:
    moment = Moment(batch=plan.batch)
    masks = Masks(seed=0, device=torch.device("cpu"), moment=moment)
    return Substitutes(plan, RunOptions(**options), device=0, statistics={}, masks=masks)  # type: ignore[arg-type]


def test_a_block_that_mixes_samples_in_an_unknown_way_may_not_be_split() -> None:
    traced = trace_job(_job(Mixing, "image"))
    split = make_plan(traced.graph, [(0, [0, 1])], num_devices=2, batch=8)
    with pytest.raises(RunError, match=r"mixes samples, so block .* must run on one device"):
        _substitutes(split).apply(traced)
    _substitutes(make_plan(traced.graph, [(0, [0])], num_devices=1, batch=8)).apply(traced)


def test_dropout_inside_an_lstm_stays_local_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    traced = trace_job(_job(Recurrent, "rows"))
    plan = make_plan(traced.graph, [(0, [0, 1])], num_devices=2, batch=8)
    with caplog.at_level(logging.WARNING, logger="burstpool"):
        _substitutes(plan).apply(traced)
    assert "lstm in layer 'lstm' draws its own random numbers on each device" in caplog.text
    caplog.clear()
    _substitutes(plan, dropout="local").apply(traced)
    assert caplog.text == ""


def test_operators_know_where_their_samples_are() -> None:
    found: dict[str, Fold | None] = {}

    def note(layer: Layer, site: Site) -> None:
        if "dropout" in str(site.operator):
            found[str(site.operator)] = site.samples

    trace_job(dropout_job()).with_operators(note)
    assert found == {
        "aten.feature_dropout.default": Fold(dim=0),
        "aten.alpha_dropout.default": Fold(dim=0),
        "aten.feature_alpha_dropout.default": Fold(dim=0),
        "aten.dropout.default": Fold(dim=0, before=1, after=2),  # two heads a sample
        "aten.dropout_.default": Fold(dim=0),
    }


@pytest.mark.parametrize("samples", [Fold(dim=1), Fold(dim=1, before=2, after=3)])
def test_parts_of_a_mask_make_up_the_whole(samples: Fold) -> None:
    moment = Moment(batch=5, step=3)
    masks = Masks(seed=1, device=torch.device("cpu"), moment=moment)

    def draw(start: int, stop: int) -> Tensor:
        moment.start, moment.stop = start, stop
        size = samples.before * (stop - start) * samples.after
        return masks.draw("layer", 0, 0.5, (4, size), samples).view(4, samples.before, stop - start, samples.after)

    whole = draw(0, 5)
    assert torch.equal(torch.cat([draw(0, 2), draw(2, 3), draw(3, 5)], 2), whole)
    moment.step = 4
    assert not torch.equal(draw(0, 5), whole)


def test_members_of_a_group_must_go_through_its_blocks_in_one_order() -> None:
    def forward(minibatch: int) -> Action:
        return Action(kind=Kind.FORWARD, block="a", minibatch=minibatch, stop=1)

    schedule = Schedule(devices=((forward(0), forward(1)), (forward(1), forward(0))))
    check_orders(schedule, {})
    with pytest.raises(RunError, match=r"devices 0 and 1 run blocks that they normalise together in different orders"):
        check_orders(schedule, {"a": (0, 1)})
