"""The gate between a foreground and a background: what is announced, allowed and counted; no process is started."""

import itertools
import math
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from share_alone import wait_for
from share_stand_ins import Clock, allowance

from burstpool.engine.base import phrase
from burstpool.run.torchrun import Silent
from burstpool.share.budget import Budget, Moment
from burstpool.share.gates.announce import Announcer, Pace
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.gated import GatedDoing
from burstpool.share.gates.on_device import WhenReached


def test_a_gate_allows_by_moment_and_counts_by_moment(tmp_path: Path) -> None:
    gate, other = Gate.create(tmp_path / "gate"), Gate(tmp_path / "gate")
    assert other.allowed_s(other.moment) == math.inf  # the foreground has not begun
    gate.allow(allowance(0.002, math.inf), step=0)
    gate.announce(Moment.COMPUTING)
    assert other.allowed_s(other.moment) == 0.002
    for moment in (Moment.COMPUTING, Moment.WAITING, Moment.ENDED):
        other.begin_slice(moment)
        torch.ones(300, 300) @ torch.ones(300, 300)
        assert gate.done().overlapped_s > 0  # also while it is under way
        other.end_slice()
    done = gate.done()
    assert min(done.overlapped_s, done.in_gaps_s, done.outside_s) > 0
    assert len(gate.slices()) == 2  # not what comes after the foreground
    assert all(start < stop for start, stop in gate.slices())
    gate.close()
    assert [other.allowed_s(moment) for moment in (Moment.COMPUTING, Moment.WAITING, Moment.IDLE)] == [0, 0, 0]
    gate.let_leave()
    assert other.allowed_s(Moment.COMPUTING) == math.inf


def test_what_a_background_does_when_the_foreground_has_ended_does_not_push_earlier_slices_out(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    gate.begin_slice(Moment.WAITING)
    gate.end_slice()
    [seen] = gate.slices()
    for _ in range(20_000):
        gate.begin_slice(Moment.ENDED)
        gate.end_slice()
    assert gate.slices() == [seen]
    assert gate.done().outside_s > 0


def test_a_background_that_is_gone_leaves_its_part_to_the_others_of_its_device(tmp_path: Path) -> None:
    gates = [Gate.create(tmp_path / str(i)) for i in range(3)]
    pace = Pace(Budget(), (), [gates[:2], gates[2:]])
    pace._controller = Mock(allowance=allowance(0.004), alone_s=None)
    steps = itertools.count()

    def allowed() -> list[float]:
        pace.begin(next(steps))
        return [gate.allowed_s(Moment.COMPUTING) for gate in gates]

    assert allowed() == [0.002, 0.002, 0.004]
    gates[0].say_away(True)
    assert allowed()[1:] == [0.004, 0.004]
    gates[0].say_away(False)
    assert allowed() == [0.002, 0.002, 0.004]
    gates[2].say_away(True)
    gates[1].begin_slice(Moment.COMPUTING)
    torch.ones(300, 300) @ torch.ones(300, 300)
    work_s = gates[1].end_slice()
    allowed()
    assert pace.log.overlapped_s[-1] == pytest.approx(work_s)  # on the one device that has company


def test_a_slowdown_is_told_from_the_first_shared_step_on(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    pace = Pace(Budget(), (), [[gate]])
    for step in range(5):
        pace.begin(step)
    assert gate.told() == (0, 0)  # the first steps are long, and measure the base
    gate.begin_slice(Moment.COMPUTING)
    torch.ones(300, 300) @ torch.ones(300, 300)
    gate.end_slice()
    pace.begin(5)
    assert gate.told() == (pace._controller.alone_s, pace.log.times_s[-1])


def test_a_small_allowance_adds_up_to_a_slice_now_and_then(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    doing = GatedDoing(Silent(), Gate(tmp_path / "gate"))
    doing._slice_s = 1.0
    gate.announce(Moment.COMPUTING)
    started = 0
    for step in range(30):
        gate.allow(allowance(0.3), step=step)
        if doing._has_credit(Moment.COMPUTING):
            doing._credit[Moment.COMPUTING].spend(1.0)
            started += 1
    assert 8 <= started <= 9
    gate.allow(allowance(alone=True), step=31)
    doing._credit[Moment.COMPUTING].left_s = 5.0
    assert not doing._has_credit(Moment.COMPUTING)  # an alone step is alone, whatever was saved up


def test_steps_that_pass_during_a_long_slice_pay_for_their_part_of_it_and_save_no_more_than_a_slice(
    tmp_path: Path,
) -> None:
    gate = Gate.create(tmp_path / "gate")
    doing = GatedDoing(Silent(), Gate(tmp_path / "gate"))
    doing._slice_s = 1.0
    gate.announce(Moment.COMPUTING)
    gate.allow(allowance(2.0), step=0)
    assert doing._has_credit(Moment.COMPUTING)
    for step in (1, 2, 3, 4):  # a checkpoint, say, is written meanwhile
        gate.allow(allowance(alone=True) if step == 2 else allowance(2.0), step=step)
    doing._credit[Moment.COMPUTING].spend(7.0)
    assert doing._has_credit(Moment.COMPUTING)
    assert doing._credit[Moment.COMPUTING].left_s == pytest.approx(1.0)  # four steps allowed 2 s each
    for step in range(5, 50):
        gate.allow(allowance(2.0, math.inf if step < 49 else 2.0), step=step)
    for moment in (Moment.COMPUTING, Moment.WAITING):
        assert doing._has_credit(moment)
        assert doing._credit[moment].left_s == pytest.approx(3.0)  # the last step's, and a slice


def test_a_step_that_begins_while_it_is_looked_at_is_paid_for_once(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    doing = GatedDoing(Silent(), gate)
    doing._slice_s = 10.0
    for step in range(4):
        gate.allow(allowance(0.5), step=step)
        doing._has_credit(Moment.COMPUTING)
        doing._foreground_step = -1.0  # what it read before the step's number was written
        doing._has_credit(Moment.COMPUTING)
    assert doing._credit[Moment.COMPUTING].left_s == pytest.approx(2.0)


def test_what_a_step_allows_is_written_again_when_its_share_changes_and_adds_up_when_it_does_not(
    tmp_path: Path,
) -> None:
    gate, seen = Gate.create(tmp_path / "gate"), Gate(tmp_path / "gate")
    first, other = allowance(0.5), allowance(0.2)
    before_s = seen.allowed_so_far_s(Moment.COMPUTING)
    told = []
    for step, (allowed, share) in enumerate([(first, 1.0), (first, 1.0), (first, 0.5), (other, 0.5), (first, 1.0)]):
        gate.allow(allowed, step=step, share=share)
        told.append(seen.allowed_s(Moment.COMPUTING))
    assert told == pytest.approx([0.5, 0.5, 0.25, 0.1, 0.5])
    assert seen.allowed_so_far_s(Moment.COMPUTING) - before_s == pytest.approx(sum(told))


def test_before_its_first_step_a_background_does_not_ask(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    gate.close()
    GatedDoing(Silent(), Gate(tmp_path / "gate")).say(phrase("tracing the model"))  # returns


def test_what_is_said_of_a_device_is_passed_on_in_order_when_it_gets_there() -> None:
    reached, seen = threading.Semaphore(0), []

    class Mark:
        def synchronize(self) -> None:
            reached.acquire()

    when = WhenReached(Mark)
    for number in range(5):
        when(partial(seen.append, number))
    time.sleep(0.01)
    assert not seen
    reached.release(2)
    wait_for(lambda: seen == [0, 1])
    reached.release(3)
    when.finish()
    assert seen == [0, 1, 2, 3, 4]


def test_a_worker_that_is_ahead_of_its_device_announces_what_the_device_does(tmp_path: Path) -> None:
    gate, later = Gate.create(tmp_path / "gate"), []
    pace = Pace(Budget(), (), [[gate]])
    announcer = Announcer(
        Silent(), [gate], pace=pace, reduces=False, when=later.append, memory=lambda: (3 << 30, 8 << 30)
    )
    for step in range(3):
        announcer.begin_step(step)
        for words in ("forward a", "receive x", "backward a"):
            announcer.say(phrase(words))
    assert (gate.moment, pace.log.times_s, gate.told_memory()) == (Moment.IDLE, [], None)
    seen = []
    for action in later:
        action()
        seen.append(gate.moment.value)
    assert seen[1:5] == ["computing", "waiting", "computing", "computing"]
    assert len(pace.log.times_s) == 2
    assert gate.told_memory() == (3 << 30, 8 << 30)


def test_work_that_a_gpu_does_is_counted_by_the_wall_and_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("burstpool.share.gates.gate.time", clock)
    gate = Gate.create(tmp_path / "gate")
    gate.count_by_wall()
    # What the device still does:
    doing = GatedDoing(Silent(), Gate(tmp_path / "gate"), wait=lambda: clock.pass_by(0.03))
    doing.begin_step(0)
    gate.announce(Moment.COMPUTING)
    for words in ("forward a", "forward b", "forward c"):
        doing.say(phrase(words))
    assert gate.done().overlapped_s == pytest.approx(0.06, abs=1e-6)  # c has only begun
    clock.pass_by(0.01)
    assert gate.done().overlapped_s == pytest.approx(0.07, abs=1e-6)
