"""The page: all there is on it, nothing from elsewhere, and no name becomes markup."""

from dataclasses import replace
from itertools import product
from typing import Any
from xml.etree import ElementTree

import pytest
from report_cases import EVIL, Page, background_job, contents, event, timeline

from burstpool.report.contents import LayerTime, PlannedWork
from burstpool.report.draw_charts import shortened
from burstpool.report.html import page
from burstpool.report.overlay import MOST_BARS
from burstpool.report.svg import standalone
from burstpool.report.timeline import Timeline


def test_a_page_shows_everything() -> None:
    found = Page(page(contents(notes=("Careful.",))))
    assert found.texts_of("h1") == ["tiny"]
    assert found.texts_of("h2") == [
        "A step, predicted and measured",
        "The plan: devices a block",
        "Training",
        "Background jobs",
        "The profile: time a layer",
        "Blocks",
        "Details",
    ]
    shown = found.texts_of("div")
    for text in ("samples/s", "step time", "−50.0%", "too fast", "of 4", "from 2"):
        assert text in shown
    assert "Careful." in found.texts_of("li")
    tips = found.texts_of("title")
    assert "backward a\npredicted\n2 s: 1 s to 3 s" in tips
    assert "backward a\nmeasured\n4 s: 2 s to 6 s" in tips
    assert "a\n2 layers on 2 devices\n3 s predicted" in tips
    assert {"5", "4–5", "0–1", "3 s"} & set(found.texts_of("td")) == {"4–5", "0–1"}
    assert found.texts_of("dd") == ["0.1"]
    assert "small ×2, beside device 1" in found.texts_of("h3")
    assert {"1,200", "42%", "ended"} <= set(found.texts_of("td"))
    assert "small ×2, member 0\nended" in tips
    assert [a["class"] for a in found.all_of("path") if "best" in (a.get("class") or "")] == ["curve trial best"]


def test_a_background_job_that_never_trained_is_told_of_without_a_picture() -> None:
    job = background_job("small", kept=None, steps=0, state="failed", reason="no memory")
    found = Page(page(contents(backgrounds=(job,))))
    assert "failed: no memory" in found.texts_of("td")
    assert not [text for text in found.texts_of("h3") if "small" in text]


def test_predicted_is_outlined_and_measured_filled_and_one_alone_is_filled() -> None:
    both = Page(page(contents()))
    groups = [attributes["class"] for attributes in both.all_of("g")]
    assert "zoomable predicted" in groups
    assert "zoomable filled" in groups
    alone = Page(page(contents(measured=None)))
    assert "zoomable predicted" not in [attributes["class"] for attributes in alone.all_of("g")]


@pytest.mark.parametrize("missing", list(product([False, True], repeat=5)))
def test_any_piece_may_be_missing(missing: tuple[bool, ...]) -> None:
    pieces: dict[str, Any] = {"predicted": None, "measured": None, "blocks": (), "layers": (), "trained": ()}
    changes = {name: empty for (name, empty), left_out in zip(pieces.items(), missing, strict=True) if left_out}
    found = Page(page(contents(**changes)))
    titles = found.texts_of("h2")
    assert any(title.startswith("A step") for title in titles) == (len({"predicted", "measured"} & changes.keys()) < 2)
    assert ("Blocks" in titles) == ("blocks" not in changes)
    assert ("The plan: devices a block" in titles) == ("blocks" not in changes)
    assert ("The profile: time a layer" in titles) == ("layers" not in changes)
    assert ("Training" in titles) == ("trained" not in changes)


def test_a_page_loads_nothing() -> None:
    found = Page(page(contents()))
    assert {"link", "img", "iframe", "object", "embed", "base", "use", "image", "a"}.isdisjoint(
        tag for tag, _ in found.tags
    )
    for tag, attributes in found.tags:
        assert {"src", "href", "xlink:href", "srcset", "style"}.isdisjoint(attributes), tag
        assert not any(name.startswith("on") for name in attributes), tag
    text = page(contents())
    assert "@import" not in text
    assert "url(" not in text.replace("url(#plot)", "")
    assert "default-src 'none'" in (found.all_of("meta")[-1]["content"] or "")


def test_names_never_become_markup() -> None:
    hostile = timeline()
    events = tuple(replace(each, block=EVIL, kind=EVIL) for each in hostile.events)
    text = page(
        contents(
            model=EVIL,
            strategy=EVIL,
            predicted=replace(hostile, events=events),
            blocks=(PlannedWork(name=EVIL, num_layers=1, devices=(0,), samples=(9,)),),
            layers=(LayerTime(name=EVIL, kind=EVIL, forward_s=1.0, backward_s=1.0),),
            layers_title=EVIL,
            backgrounds=(background_job(EVIL, (2.0, 1.0), state=EVIL, reason=EVIL),),
            details={EVIL: EVIL},
            notes=(EVIL,),
            made_by=EVIL,
        )
    )
    found = Page(text)
    assert len(found.all_of("script")) == 1
    assert "\x00" not in text
    assert "alert(" not in "".join(found.texts_of("script"))
    assert any("<script>" in told for told in found.texts_of("title"))


def test_the_size_of_a_page_is_bounded() -> None:
    """20,000 bars of some 200 bytes."""
    events = tuple(
        event(device, "forward", place, place + 0.5, block=f"features.{place % 7}")
        for place in range(2000)
        for device in range(60)
    )
    some = Timeline(source="measured", num_devices=60, step_time_s=2000.0, events=events)
    text = page(contents(predicted=None, measured=some, layers=()))
    assert text.count('class="bar') <= MOST_BARS
    assert len(text) < 6_000_000
    assert "short events are drawn together" in text


def test_many_devices_and_many_blocks_are_said_to_be_cut() -> None:
    events = tuple(event(device, "forward", 0, 1) for device in range(100))
    some = Timeline(source="predicted", num_devices=100, step_time_s=1.0, events=events)
    blocks = tuple(PlannedWork(name=f"b{i}", num_layers=1, devices=(0,), samples=(1,)) for i in range(400))
    text = page(contents(predicted=some, measured=None, blocks=blocks))
    assert "24 of 100 devices are shown" in text
    assert "The first 300 of 400 blocks." in text


def test_events_without_length_and_steps_without_time_are_drawn() -> None:
    some = Timeline(source="measured", num_devices=1, step_time_s=0.0, events=(event(0, "odd", 1.0, 1.0),))
    Page(page(contents(predicted=None, measured=some)))


def test_a_picture_stands_alone_as_xml_without_variables() -> None:
    from burstpool.report.draw_timeline import WIDTH, timeline_picture
    from burstpool.report.overlay import overlay

    shown = overlay([timeline()])
    assert shown is not None
    drawn, height = timeline_picture(shown, caption=EVIL, legend=True)
    text = standalone(drawn, width=WIDTH, height=height)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(--" not in text


def test_a_long_name_loses_its_middle() -> None:
    assert shortened("abc", 5) == "abc"
    assert shortened("abcdefgh", 5) == "ab…gh"
