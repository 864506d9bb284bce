"""Timelines, contents and run folders for the tests of reports."""

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec, DeviceCount, DeviceFigures, NodeGroup
from burstpool.plan.inputs import PlanInputs
from burstpool.plan.plan import Plan, PlannedBlock, even_shares
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.report.contents import BackgroundJob, Contents, LayerTime, PlannedWork, TrainedStep
from burstpool.report.sweep_contents import TrialCurve
from burstpool.report.timeline import Event, Timeline
from burstpool.run.folder import RunFolder, RunRecord, StepLoss

EVIL = '<script>alert("1")</script>&\x00\'"'
"""A name that must not become markup."""


def event(device: int, kind: str, start_s: float, stop_s: float, **changes: Any) -> Event:
    lane = "compute" if kind in ("forward", "backward", "step") else "communication"
    fields: dict[str, Any] = {"lane": lane, "block": "a", "step": 0}
    return Event(device=device, kind=kind, start_s=start_s, stop_s=stop_s, **(fields | changes))


def timeline(source: Any = "predicted", *, num_devices: int = 2, steps: int = 1, slow: float = 1.0) -> Timeline:
    """Forward 0 to 1, backward 1 to 3, reduce 3 to 4, update 4 to 4.5; device 1 has no update."""
    spans = (("forward", 0, 1), ("backward", 1, 3), ("reduce", 3, 4), ("step", 4, 4.5))
    events = [
        event(device, kind, (step * 5 + start) * slow, (step * 5 + stop) * slow, step=step)
        for step in range(steps)
        for kind, start, stop in spans
        for device in range(num_devices)
        if not (kind == "step" and device == 1)
    ]
    return Timeline(source=source, num_devices=num_devices, step_time_s=4.5 * slow, events=tuple(events))


def contents(**changes: Any) -> Contents:
    """Everything there can be."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "strategy": "burst",
        "num_devices": 4,
        "samples_per_step": 9,
        "predicted": timeline(),
        "measured": timeline("measured", steps=3, slow=2.0),
        "blocks": (PlannedWork(name="a", num_layers=2, devices=(0, 1), samples=(5, 4)),),
        "layers": tuple(LayerTime(name=f"l{i}", kind="conv", forward_s=1.0, backward_s=float(i)) for i in range(3)),
        "layers_title": "tiny on unit",
        "trained": tuple(TrainedStep(step=step, loss=2.0 / (step + 1), time_s=9.0) for step in range(60)),
        "backgrounds": (background_job("small ×2", (3.0, 2.0, 1.0), (3.0, 2.5, math.nan)),),
        "details": {"lr": "0.1"},
    }
    return Contents(**(fields | changes))


def background_job(name: str, *losses: tuple[float, ...], **changes: Any) -> BackgroundJob:
    """An array, or a single job."""
    members = tuple(
        TrialCurve(number=number, name=f"{name}, member {number}", settings={}, state="ended", losses=each, reports=())
        for number, each in enumerate(losses)
    )
    fields: dict[str, Any] = {"device": 1, "steps": 1200, "kept": 0.42, "state": "ended", "reason": ""}
    return BackgroundJob(name=name, members=members, **(fields | changes))


def plan(name: str = "a") -> Plan:
    blocks = (PlannedBlock(name=name, layers=("l0", "l1"), shares=even_shares(9, (0, 1))),)
    return Plan(model="tiny", strategy="test", num_devices=2, batch=9, blocks=blocks, step_time_s=4.0)


def profile() -> Profile:
    times = {1: 1.0, 4: 2.0}
    layers = tuple(
        LayerProfile(
            name=f"l{i}",
            inputs=(f"l{i - 1}" if i else "input",),
            parameter_bytes=4,
            output_bytes_per_sample=4,
            forward_s=times,
            backward_s=times,
        )
        for i in range(2)
    )
    return Profile(model="tiny", device="A100", source="made up", layers=layers)


def planned_inputs() -> tuple[Plan, PlanInputs]:
    """Two layers on two devices that can be simulated."""
    figures = DeviceFigures(name="A100", memory_bytes=10**9, memory_bytes_per_s=1e9, flops_per_s={"fp32": 1e9})
    link = Link(bytes_per_s=1e6, latency_s=1e-3)
    node = NodeGroup(name="node", count=1, devices=(DeviceCount(type="A100", count=2),), link=link)
    cluster = ClusterSpec(name="two", node_groups=(node,), device_types=(figures,))
    made = Plan(
        model="tiny",
        strategy="test",
        num_devices=2,
        batch=4,
        blocks=(PlannedBlock(name="l0", layers=("l0", "l1"), shares=even_shares(4, (0, 1))),),
    )
    return made, PlanInputs(cluster=cluster, profiles=(profile(),))


def run_folder(path: Path, *pieces: str) -> RunFolder:
    """A run folder with these pieces: plan, profile, predicted, measured, losses, error."""
    folder = RunFolder.create(path)
    settings = {"lr": 0.1}
    RunRecord(job="tiny", source="job.py", settings=settings, steps=3, started="today", versions={"torch": "2"}).save(
        folder.record
    )
    if "plan" in pieces:
        plan().save(folder.plan)
    if "profile" in pieces:
        profile().save(path / "profile.json")
    if "predicted" in pieces:
        timeline().save(path / "predicted.json")
    if "measured" in pieces:
        timeline("measured", slow=2.0).save(folder.timeline)
    if "losses" in pieces:
        folder.add_losses(StepLoss(step=step, loss=3.0 - step, step_time_s=9.0) for step in range(3))
    if "error" in pieces:
        folder.error.write_text("Traceback\n\nValueError: bad <b>\n")
    return folder


class Page(HTMLParser):
    """What a browser would see of a page: tags, text, ids; fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        """(tag, text directly inside)"""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def all_of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def texts_of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]
