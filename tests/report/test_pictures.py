"""The pictures of the README and the documentation: made by `scripts/pictures.py`, whole and of today's code."""

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "benchmarks" / "burst" / "profiles" / "vgg16.h200.json"
TITLE = "{http://www.w3.org/2000/svg}title"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "pictures.py"))


def test_the_flow_is_up_to_date(script: dict[str, Any]) -> None:
    drawn = script["flow_svg"]()
    assert (ROOT / "docs" / "pictures" / "flow.svg").read_text() == drawn
    texts = [each.text for each in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    for word in ("job.py", "LayerGraph", "Profile", "Plan", "Schedule", "simulate", "execute", "Timeline", "Report"):
        assert word in texts


@pytest.mark.skipif(not PROFILE.is_file(), reason=f"no {PROFILE}")
def test_the_burst_plan_leaves_gaps_and_narrows(script: dict[str, Any]) -> None:
    plan, timeline = script["burst_example"]()
    assert {len(block.devices) for block in plan.blocks} > {4, 1}
    assert any(stop_s - start_s > timeline.step_time_s / 10 for spans in timeline.gaps() for start_s, stop_s in spans)
    titles = [each.text or "" for each in ElementTree.fromstring(script["skyline_svg"](plan, timeline)).iter(TITLE)]
    assert len(titles) == len(plan.blocks)
    root = ElementTree.fromstring(script["timeline_svg"](plan, timeline))
    assert len(list(root.iter(TITLE))) == len(timeline.events)


@pytest.mark.parametrize("name", ["flow", "timeline", "skyline", "sharing"])
def test_pictures_are_whole_and_load_nothing(name: str) -> None:
    text = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
    ElementTree.fromstring(text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
