"""Joining what workers report and record."""

import time

import pytest

from burstpool.plan.plan import Plan, PlannedBlock, even_shares
from burstpool.run.measured import measured_timeline
from burstpool.run.progress import Reporter, RunLog, StepsReport
from burstpool.run.recorder import RecordedStep, Recorder
from burstpool.run.update import LossScale
from burstpool.schedule.actions import Action, Kind, Schedule

PLAN = Plan(
    model="m",
    strategy="test",
    num_devices=4,
    batch=8,
    blocks=(
        PlannedBlock(name="a", layers=("a",), shares=even_shares(8, (0,))),
        PlannedBlock(name="b", layers=("b",), shares=even_shares(8, (1, 2))),
    ),
)


def _report(first: int, losses: list[tuple[int, float]], count: int, *, busy_s: float | None = 0.5) -> StepsReport:
    return StepsReport(first_step=first, losses=tuple(losses), times_s=(1.0,) * count, busy_s=busy_s)


def test_a_step_is_whole_when_all_devices_that_work_have_ended_it() -> None:
    log = RunLog(PLAN, steps=10, first_step=3)
    assert log.progress() is None
    assert log.add(1, _report(3, [(3, 0.25), (4, 0.5)], 2)) == []
    assert log.add(2, _report(3, [(3, 0.5)], 1)) == []
    assert log.add(3, _report(3, [], 5)) == []  # has no share
    whole = log.add(0, _report(3, [], 2))
    assert [(loss.step, loss.loss) for loss in whole] == [(3, 0.75)]
    whole = log.add(2, _report(4, [(4, 1.0)], 1))
    assert [(loss.step, loss.loss) for loss in whole] == [(4, 1.5)]
    progress = log.progress()
    assert progress is not None
    assert (progress.step, progress.loss, progress.samples_per_s) == (5, 1.5, 8.0)
    assert progress.utilisation is not None
    assert 0 < progress.utilisation <= 0.5


def test_losses_may_come_a_step_late_and_utilisation_may_be_unknown() -> None:
    log = RunLog(PLAN, steps=10, first_step=0)
    log.add(0, _report(0, [], 2, busy_s=None))
    log.add(1, _report(0, [(0, 1.0)], 2, busy_s=None))
    assert [x.loss for x in log.add(2, _report(0, [(0, 1.0)], 2, busy_s=None))] == [2.0]
    log.add(1, _report(2, [(1, 1.0)], 0, busy_s=None))
    assert [x.loss for x in log.add(2, _report(2, [(1, 2.0)], 0, busy_s=None))] == [3.0]
    progress = log.progress()
    assert progress is not None
    assert progress.utilisation is None


def test_reports_are_gathered_and_flushed() -> None:
    reports: list[StepsReport] = []
    reporter = Reporter(reports.append, first_step=7)
    reporter.add([(7, 1.0)], 0.1, 0.05)
    reporter.add([(8, 0.5)], 0.1, 0.05)
    assert reports == []
    reporter.flush()
    reporter.flush()
    assert [(r.first_step, r.losses, r.busy_s) for r in reports] == [(7, ((7, 1.0), (8, 0.5)), 0.1)]
    reporter.add([], 0.1, None)
    reporter.flush([(9, 0.25)])
    assert (reports[1].first_step, reports[1].losses, reports[1].busy_s) == (9, ((9, 0.25),), None)


def test_messages_and_reductions_span_from_their_last_start_to_their_end() -> None:
    def action(kind: Kind, block: str, **fields: object) -> Action:
        return Action(kind=kind, block=block, **fields)  # type: ignore[arg-type]

    message = {"value": "v", "start": 0, "stop": 4}
    schedule = Schedule(
        devices=(
            (
                action(Kind.FORWARD, "a"),
                action(Kind.SEND, "a", peer=1, **message),
                action(Kind.REDUCE, "c", group=(0, 1)),
            ),
            (action(Kind.RECEIVE, "a", peer=0, **message), action(Kind.REDUCE, "c", group=(0, 1))),
            (),
        )
    )
    second = 1_000_000_000
    recorded = [
        [RecordedStep(step=5, starts_ns=[0, second, 3 * second], stops_ns=[second, 0, 6 * second])],
        [RecordedStep(step=5, starts_ns=[0, 4 * second], stops_ns=[2 * second, 5 * second])],
        [],
    ]
    timeline = measured_timeline(schedule, recorded, step_times_s=[6.0, 7.0, 8.0])
    assert timeline is not None
    spans = {(e.device, e.kind): (e.lane, e.start_s, e.stop_s) for e in timeline.events}
    assert spans == {
        (0, "forward"): ("compute", 0, 1),
        (0, "send"): ("communication", 1, 2),
        (1, "receive"): ("communication", 1, 2),
        (0, "reduce"): ("communication", 4, 6),
        (1, "reduce"): ("communication", 4, 5),
    }
    assert timeline.step_time_s == 7.0


def test_no_timeline_without_records() -> None:
    schedule = Schedule(devices=((Action(kind=Kind.FORWARD, block="a"),),))
    assert measured_timeline(schedule, [[]], step_times_s=[1.0]) is None


@pytest.mark.alone
def test_recording_an_action_takes_microseconds() -> None:
    actions = [Action(kind=Kind.FORWARD, block="a")] * 100
    recorder = Recorder(actions, num_steps=20)

    def record() -> float:
        begin = time.perf_counter()
        starts, stops = recorder.begin_step(3)
        for index in range(len(actions)):
            starts[index] = time.perf_counter_ns()
            stops[index] = time.perf_counter_ns()
            recorder.look(time.perf_counter_ns())
        return (time.perf_counter() - begin) / len(actions)

    # About 0.5 µs; 1% of a step whose actions take half a millisecond each.
    assert min(record() for _ in range(20)) < 5e-6


def test_the_loss_scale_halves_on_overflow_and_grows_after_many_good_steps() -> None:
    scale = LossScale(factor=8.0, growth_interval=3)
    scale.after(overflowed=True)
    assert scale.factor == 4.0
    for _ in range(3):
        scale.after(overflowed=False)
    assert (scale.factor, scale.good_steps) == (8.0, 0)
