"""Pictures: what is drawn is what happened."""

from pathlib import Path
from xml.etree import ElementTree

from schedule_cases import block, chain, on, plan, run, units

from burstpool.report.timeline import Event, Timeline
from burstpool.schedule.draw import draw, outline, rects, svg
from burstpool.schedule.lower import lower
from burstpool.schedule.text import format_schedule

DOCS = Path(__file__).parents[2] / "docs"


def test_a_timeline_in_text_shows_kinds_and_gaps() -> None:
    # Forward 0 to 2, backward 2 to 6, reduction 6 to 18, update 18 to 19: one column a second.
    timeline = run(plan(block("a", on(4, 0, 1)), num_devices=3))
    assert draw(timeline, width=12 + 19).splitlines() == [
        "            0              19 s",
        "devices 0–1 ▒▒████············▓",
        "                  ════════════",
        "device 2    ···················",
        "            ▒ forward  █ backward  ═ reduce  ▓ step  · gap",
    ]


def test_devices_that_do_the_same_share_a_row() -> None:
    text = draw(run(plan(block("a", on(4, 0, 1, 3)), num_devices=4)))
    assert "devices 1,3" in text
    assert (
        draw(run(plan(block("a", on(4, 0, 2)), num_devices=4)), most_rows=1).splitlines()[3] == "… and 2 more devices"
    )


def test_nothing_is_drawn_of_nothing() -> None:
    empty = Timeline(source="measured", num_devices=1, step_time_s=0.0, events=())
    assert draw(empty) == "nothing happens\n"
    assert rects(empty) == ()


def test_events_without_length_are_drawn() -> None:
    moment = Event(device=0, lane="compute", kind="odd", block="a", start_s=1.0, stop_s=1.0)
    timeline = Timeline(source="measured", num_devices=1, step_time_s=1.0, events=(moment,))
    assert "device 0" in draw(timeline)
    ElementTree.fromstring(svg(timeline))


def test_rects_are_the_events_and_the_gaps() -> None:
    timeline = run(plan(block("a", on(2, 0)), block("b", on(2, 1))))
    found = rects(timeline)
    assert [(r.device, r.lane, r.kind, r.block, r.start_s, r.stop_s) for r in found] == [
        (e.device, e.lane, e.kind, e.block, e.start_s, e.stop_s) for e in timeline.events
    ]
    assert {r.block: r.block_index for r in found} == {"a": 0, "b": 1}
    gaps = rects(timeline, gaps=True)[len(found) :]
    assert [(r.device, r.start_s, r.stop_s) for r in gaps] == [
        (device, *span) for device, spans in enumerate(timeline.gaps()) for span in spans
    ]
    assert {r.kind for r in gaps} == {"gap"}


def test_an_outline_shows_the_order() -> None:
    case = plan(block("a", on(1, 0)), block("b", on(1, 1)), num_minibatches=2, num_devices=3)
    assert outline(lower(case, chain(2))) == (
        "device 0  a▸0 a▸1 ◂a0 ◂a1\ndevice 1  b▸0 ◂b0 b▸1 ◂b1\ndevice 2  nothing to do\n"
    )


def example() -> Timeline:
    """The schedule that the documentation shows: one device, then two, as burst plans do."""
    case = plan(block("a", on(4, 0)), block("b", on(4, 0, 1)), block("c", on(4, 0, 1)))
    return run(case, profiles=units("abc"))


def test_an_svg_is_well_formed_and_names_its_rectangles() -> None:
    root = ElementTree.fromstring(svg(example()))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "reduce c: 14 s" in titles
    assert "send a, minibatch 0: 3 s" in titles


def test_the_pictures_of_the_documentation_are_up_to_date() -> None:
    assert (DOCS / "images" / "schedule.svg").read_text() == svg(example())
    indented = "".join(f"    {line}\n" for line in draw(example(), width=96).splitlines())
    assert indented in (DOCS / "schedule.md").read_text()


def test_the_schedules_of_the_documentation_are_what_lowering_makes() -> None:
    page = (DOCS / "schedule.md").read_text()
    burst = plan(block("a", on(4, 0)), block("b", on(4, 0, 1)), block("c", on(4, 0, 1)))
    pipeline = plan(*(block(name, on(1, device)) for device, name in enumerate("abc")), num_minibatches=4)
    for text in (format_schedule(lower(burst, chain(3))), outline(lower(pipeline, chain(3)))):
        assert "".join(f"    {line}\n" for line in text.splitlines()) in page
