"""`burstpool report`: from run folders and from files; mistakes are one line."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from report_cases import Page, plan, planned_inputs, profile, run_folder, timeline

from burstpool.cli.app import app, run
from burstpool.cli.report import gather, report
from burstpool.report.html import page
from burstpool.report.sweep_curves import trial_curves
from burstpool.report.timeline import WHOLE_STEP, Event, Timeline
from burstpool.share.base import Background, BackgroundOutcome
from burstpool.share.results import BackgroundFolder
from burstpool.share.step_log import SHARING, StepLog

PIECES = ("plan", "profile", "predicted", "measured", "losses", "error")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    if report not in [command.callback for command in app.registered_commands]:
        monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
        app.command()(report)


@pytest.mark.parametrize("pieces", [chosen for size in range(7) for chosen in combinations(PIECES, size)])
def test_a_run_folder_with_any_pieces_makes_a_page(pieces: tuple[str, ...], tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", *pieces)
    assert run(["report", str(folder.path)]) == 0
    text = (folder.path / "report.html").read_text()
    found = Page(text)
    assert found.texts_of("h1") == ["tiny"]
    assert ("The run failed: ValueError: bad &lt;b&gt;" in text) == ("error" in pieces)
    assert ("Blocks" in found.texts_of("h2")) == ("plan" in pieces)


def test_files_make_a_page_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    timeline().save("p.json")
    timeline("measured", slow=2.0).save("m.json")
    plan().save("plan.json")
    profile().save("profile.json")
    words = ["--timeline", "m.json", "--timeline", "p.json", "--plan", "plan.json", "--profile", "profile.json"]
    assert run(["report", *words, "--perfetto", "trace.json"]) == 0
    shown = capsys.readouterr().out
    assert "tiny: a step takes 4.5 s predicted, 9 s measured (error −50.0%)" in shown
    assert "Written to report.html" in shown
    assert len(Page(Path("report.html").read_text()).texts_of("h2")) == 4
    processes = [e for e in json.loads(Path("trace.json").read_text())["traceEvents"] if e["name"] == "process_name"]
    assert len(processes) == 4


def test_json_is_one_object_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", "plan", "predicted", "measured", "losses")
    assert run(["report", str(folder.path), "-o", str(tmp_path / "x" / "page.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == str(tmp_path / "x" / "page.html")
    assert (found["predicted_step_s"], found["measured_step_s"], found["step_error"]) == (4.5, 9.0, -0.5)
    assert (found["num_steps"], found["last_loss"], found["perfetto"], found["notes"]) == (3, 1.0, None, [])


def test_a_plan_with_its_inputs_is_simulated(tmp_path: Path) -> None:
    made, inputs = planned_inputs()
    made.save(tmp_path / "plan.json")
    inputs.save(tmp_path / "plan.inputs.json")
    found = gather(None, plan_file=tmp_path / "plan.json")
    assert found.predicted is not None
    assert found.layers_title == "tiny on A100, batch 2"
    given = gather(None, plan_file=tmp_path / "plan.json", timelines=[timeline().save(tmp_path / "t.json")])
    assert given.predicted == timeline()


def test_what_does_not_belong_together_is_noted(tmp_path: Path) -> None:
    timeline(num_devices=3).save(tmp_path / "p.json")
    timeline("measured").save(tmp_path / "m.json")
    plan("other").save(tmp_path / "plan.json")
    files = [tmp_path / "p.json", tmp_path / "m.json"]
    notes = gather(None, timelines=files, plan_file=tmp_path / "plan.json").notes
    assert "3 devices were predicted, 2 were measured." in notes
    assert "The measured timeline is of another plan: this one has no block 'a'." in notes


def test_a_shared_gpu_is_drawn_as_whole_steps_and_said_to_be_shared(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "plan")
    steps = [
        Event(device=0, lane="compute", kind=WHOLE_STEP, block="vgg", start_s=at, stop_s=at + 0.9, step=int(at))
        for at in (0.0, 1.0)
    ]
    piece = Event(device=0, lane="background", kind="background", block="mlp", start_s=1.2, stop_s=1.3, step=1)
    events = (*steps, piece)
    Timeline(source="measured", num_devices=1, step_time_s=1.0, events=events).save(folder.timeline)
    StepLog(times_s=[1.0, 1.0, 1.2, 1.2] * 4, alone=[True, True, False, False] * 4).save(folder.path / SHARING)
    found = gather(folder.path)
    assert found.notes == (
        "Measured steps were replayed whole, as one graph: the plan's blocks are not told apart in them.",
        "Background jobs ran beside it: measured steps took 1.11 times the 1 s that they took without, "
        "predicted ones are without.",
    )
    drawn = page(found)
    assert "whole step vgg" in drawn
    assert "background mlp" in drawn


@pytest.mark.parametrize(("state", "look"), [("ended", "done"), ("failed", "failed"), ("evicted", "short")])
def test_a_background_that_ended_well_is_not_drawn_as_stopped_early(state: str, look: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    background = Background(source="job.py", settings=({"lr": "1"}, {"lr": "2"}))
    outcome = BackgroundOutcome(
        name="job", device=0, steps=3, kept=0.5, alone_step_s=1.0, state=state, reason="", restarts=0, evictions=0,
        losses=[[3.0, 3.0], [2.0, 2.5], [1.0, 2.0]],
    )  # fmt: skip
    BackgroundFolder.of(folder.path, 0).note(background, outcome)
    [job] = gather(folder.path).backgrounds
    assert job.state == state
    curves = trial_curves(job.members, None)
    assert curves is not None
    assert [line.look for line in curves.lines] == [look] * 2


def test_the_page_is_opened_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    folder = run_folder(tmp_path / "run")
    assert run(["report", str(folder.path), "--no-open"]) == 0
    assert opened == []
    assert run(["report", str(folder.path), "--open"]) == 0
    assert opened == [(folder.path / "report.html").resolve().as_uri()]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give a run folder, or what to report on"),
        (["none"], "none is no run folder: it has no run.json"),
        (["--timeline", "none.json"], "cannot read none.json"),
        (["--timeline", "plan.json"], "plan.json"),
        (["--timeline", "p.json", "--timeline", "p.json"], "is a second predicted timeline"),
        (["--plan", "p.json"], "p.json"),
        (["--profile", "none.json"], "cannot read none.json"),
        (["--plan", "plan.json", "--perfetto", "x.json"], "there is no timeline to make a trace of"),
        (["--plan", "plan.json", "-o", "plan.json/x.html"], "cannot write"),
        (["a", "b"], "unexpected extra argument"),
        (["run", "--wings", "2"], "No such option"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    timeline().save("p.json")
    plan().save("plan.json")
    assert run(["report", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("burstpool: error: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_reports_import_no_torch() -> None:
    modules = "burstpool.report.html, burstpool.report.perfetto, burstpool.cli.report"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
