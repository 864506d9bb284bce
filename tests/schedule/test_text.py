"""The text form: readable, parses back to the same schedule, and names the line that is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import block, chain, on, plan, planned

from burstpool.errors import ScheduleError
from burstpool.schedule.actions import Action, Kind, Schedule
from burstpool.schedule.lower import lower
from burstpool.schedule.text import format_action, format_schedule, parse, parse_action

numbers = st.integers(-3, 20)
names = st.one_of(st.sampled_from(["a", "features.0", "x:1", "a b", 'quo"te', "", "Ünïcode", "to=1", "0:4"]), st.text())
actions = st.builds(
    Action,
    kind=st.sampled_from(Kind),
    block=names,
    minibatch=numbers,
    start=numbers,
    stop=numbers,
    value=names,
    gradient=st.booleans(),
    peer=numbers,
    group=st.lists(numbers, max_size=6).map(tuple),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(actions, max_size=4).map(tuple), max_size=3).map(tuple))
def test_any_schedule_parses_back_even_an_unsound_one(devices: tuple[tuple[Action, ...], ...]) -> None:
    schedule = Schedule(devices=devices)
    assert parse(format_schedule(schedule)) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule


@settings(max_examples=50, deadline=None)
@given(planned())
def test_lowered_schedules_parse_back(case: tuple[object, object]) -> None:
    schedule = lower(*case)  # type: ignore[arg-type]
    assert parse(format_schedule(schedule)) == schedule


def test_it_reads_like_a_list_of_things_to_do() -> None:
    schedule = lower(plan(block("a", on(4, 0)), block("b", on(4, 0, 1)), num_devices=3), chain(2))
    assert (
        format_schedule(schedule)
        == """schedule 1
device 0
  forward a 0:4
  send a 2:4 value=a to=1
  forward b 0:2
  backward b 0:2
  reduce b among=0..1
  receive a 2:4 gradient=a from=1
  backward a 0:4
  step b
  step a
device 1
  receive a 2:4 value=a from=0
  forward b 2:4
  backward b 2:4
  send a 2:4 gradient=a to=0
  reduce b among=0..1
  step b
device 2
"""
    )
    assert str(schedule) == format_schedule(schedule)


def test_groups_are_short() -> None:
    action = Action(kind=Kind.REDUCE, block="a", group=(0, 1, 2, 5, 7, 8))
    assert format_action(action) == "reduce a among=0..2,5,7..8"
    assert parse_action("reduce a among=0..2,5,7..8") == action


def test_comments_and_empty_lines_mean_nothing() -> None:
    text = "# by hand\nschedule 1\n\ndevice 0\n  # only one\n  step a\n"
    assert parse(text) == Schedule(devices=((Action(kind=Kind.STEP, block="a"),),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "s.txt holds no schedule; its first line must be 'schedule 1'"),
        ("device 0", "s.txt, line 1: expected 'schedule 1', got 'device 0'"),
        ("schedule 2", "s.txt, line 1: schedule 2 is newer than this release reads; upgrade burstpool"),
        ("schedule 1\nstep a", "s.txt, line 2: an action before the first 'device 0'"),
        ("schedule 1\ndevice 1", "s.txt, line 2: expected 'device 0', got 'device 1'"),
        ("schedule 1\ndevice 0\n  walk a", "s.txt, line 3: 'walk' is no action; give forward, backward"),
        ("schedule 1\ndevice 0\n  step", "s.txt, line 3: expected an action's kind and its block, got 'step'"),
        ("schedule 1\ndevice 0\n  forward a 0-4", "s.txt, line 3: cannot read '0-4'; write samples as 0:8"),
        ("schedule 1\ndevice 0\n  forward a minibatch=x", "s.txt, line 3: cannot read 'minibatch=x'; write samples"),
        ("schedule 1\ndevice 0\n  send a from=1", "s.txt, line 3: from= means nothing to send; write"),
        ("schedule 1\ndevice 0\n  forward a 0:1 0:2", "s.txt, line 3: start is given twice"),
        ('schedule 1\ndevice 0\n  step "a', "s.txt, line 3: cannot read '\"a'; is a quote missing?"),
        ('schedule 1\ndevice 0\n  step "\\x"', 's.txt, line 3: "\\x" is no JSON string'),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text, source="s.txt")
    assert str(caught.value).startswith(message)
