"""`burstpool sweep` and `burstpool report` of a sweep, as a user types them."""

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from burstpool.cli.app import run
from burstpool.cli.sweep import _table
from burstpool.sweeping.runner import SweepProgress
from burstpool.sweeping.trials import Trial

JOBS = str(Path(__file__).with_name("sweep_jobs.py"))
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "digits_mlp.py")
QUICK = ("--array-size", "2", "--mode", "rules")


def test_json_has_all_that_scripts_want(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, job = tmp_path / "run", tmp_path / "job.py"
    job.write_text(f"print('a job may print')\n{Path(EXAMPLE).read_text()}")
    words = ["sweep", str(job), "--set", "lr=0.1,1e30,0.01", "--steps", "12", "--run-folder", str(folder), "--json"]
    assert run([*words, *QUICK]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [trial["state"] for trial in out["trials"]] == ["done", "failed", "done"]
    assert [trial["settings"] for trial in out["trials"]] == [{"lr": 0.1}, {"lr": 1e30}, {"lr": 0.01}]
    assert out["best"]["trial"] == 0
    assert out["best"]["objective"] == min(t["objective"] for t in out["trials"] if t["objective"] is not None)
    assert out["num_samples"] == 3 * 12 * 32
    assert out["wall_time_s"] > out["train_time_s"] > 0
    assert out["num_arrays"] == 1
    assert Path(out["weights"]).is_file()
    page = Path(out["report"]).read_text()
    HTMLParser().feed(page)
    assert page.count('class="curve trial') == 2, "the failed one ended before its second step"
    assert "its loss was nan at step 1" in page
    assert run(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == 0


def test_lists_are_swept_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    space = ["--set", "widths=[8],[4,4]", "--set", "rates=[0.1,0.2],[1e-2]"]
    assert run(["sweep", f"{JOBS}:layered", *space, "--steps", "2", "--run-folder", str(folder), "--json", *QUICK]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [trial["settings"] for trial in first["trials"]] == [
        {"widths": widths, "rates": rates} for widths in ("[8]", "[4,4]") for rates in ("[0.1,0.2]", "[0.01]")
    ]
    assert {trial["state"] for trial in first["trials"]} == {"done"}
    assert first["num_arrays"] == 2
    assert run(["sweep", "--resume", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == first["best"]
    assert run(["sweep", f"{JOBS}:layered", "--set", "widths=8,4"]) == 2
    error = capsys.readouterr().err
    assert "a list is written in brackets; write 'name=[64,128]'" in error
    assert error.count("\n") == 1


def test_the_table_names_the_best_and_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    words = ["sweep", EXAMPLE, "--set", "lr=log:1e-2..1", "--search", "random", "--trials", "3", "--steps", "5"]
    assert run([*words, "--run-folder", str(folder), *QUICK]) == 0
    out = capsys.readouterr().out
    assert "Best: trial" in out
    assert "mean loss over the held-out data" in out
    assert run(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert run(["report", str(folder), "--perfetto", str(tmp_path / "trace.json")]) == 2
    assert "is a sweep, which has no plan and no timeline; leave out --perfetto" in capsys.readouterr().err
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([EXAMPLE, "--set", "rate=1"], "no hyper-parameter 'rate'; it has: lr, momentum, width, dropout, batch, seed"),
        ([EXAMPLE, "--set", "lr=fast"], "unable to parse string as a number"),
        ([EXAMPLE, "--set", "lr=0.1", "--trials", "0"], "--trials 0 must be at least 1"),
        ([EXAMPLE, "--set", "lr=log:1e-3..1"], "a grid needs values; use --search random"),
        ([EXAMPLE, "--set", "lr=log:1e-3..1", "--search", "asha"], "say how many trials: --trials 64"),
        ([EXAMPLE, "--set", "lr=0.1", "--search", "luck"], "give one of grid, random, asha, optuna"),
        ([EXAMPLE], "there is nothing to search"),
        ([], "say which job to sweep"),
        (["--resume", "/nowhere"], "/nowhere is no sweep"),
        (["--resume", "/nowhere", "--set", "lr=1"], "leave out --set"),
        (["--resume", "/nowhere", "--steps", "100", "--trials", "9"], "leave out --trials, --steps"),
        (["--resume", "/nowhere", "--keep-all"], "leave out --keep-all"),
        (["--resume", "/nowhere", "--checkpoint-every", "1", "--json"], "/nowhere is no sweep"),
        ([EXAMPLE, "--set", "lr=0.1,0.10"], "lr has a value twice"),
        (["nothing.py", "--set", "lr=1"], "there is no job file nothing.py"),
        ([f"{JOBS}:refusing", "--set", "lr=0.5"], "half a rate"),
        ([f"{JOBS}:untraceable", "--set", "lr=0.5", *QUICK], "no trial of untraceable could be trained"),
        ([EXAMPLE, "--set", "seed=-1", *QUICK], "seed=-1 of job '' must be from 0 to 2**64 - 1"),
        ([f"{JOBS}:faulty", "--set", "fault=loss"], "can be trained; the first fails: RuntimeError: element 0"),
        ([EXAMPLE, "--set", "lr=0.1", "--batch", "5000", *QUICK], "a step takes 5000 samples and the data has 1437"),
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
    assert run(["sweep", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


class _Closed(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_sweep_goes_on_when_nobody_reads_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("burstpool.sweeping.runner._OBSERVE_S", -1.0)
    monkeypatch.setattr("burstpool.cli.sweep._PLAIN_INTERVAL_S", -1.0)
    monkeypatch.setattr("sys.stderr", _Closed())
    words = ["sweep", EXAMPLE, "--set", "lr=0.1,0.2", "--steps", "5", "--run-folder", str(tmp_path / "run"), "--json"]
    assert run([*words, *QUICK]) == 0
    assert [trial["state"] for trial in json.loads(capsys.readouterr().out)["trials"]] == ["done", "done"]


def test_what_is_measured_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("burstpool.cli.sweep._PLAIN_INTERVAL_S", -1.0)
    words = ["sweep", EXAMPLE, "--set", "lr=0.1,0.2", "--steps", "2", "--run-folder", str(tmp_path / "run"), "--json"]
    assert run([*words, "--mode", "rules"]) == 0
    said = capsys.readouterr()
    assert "sweeping: measuring how fast an array of 1 trial trains" in said.err
    assert "sweeping: measuring how fast an array of 2 trials trains" in said.err
    assert json.loads(said.out)["array_size"] in (1, 2)


def test_the_end_says_how_many_of_the_trials_that_are_not_shown_have_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ",".join(["1e200", *(f"0.{number}1" for number in range(10, 31))])
    words = [
        "sweep",
        f"{JOBS}:diverging",
        "--set",
        f"lr={rates}",
        "--steps",
        "2",
        "--run-folder",
        str(tmp_path / ("a" * 60)),
    ]
    assert run([*words, "--array-size", "22", "--mode", "rules"]) == 0
    said = capsys.readouterr().out
    assert "and 2 more, 1 failed" in said
    assert f"Report: {tmp_path / ('a' * 60)}" in said


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_live_table_fits_the_terminal_with_a_line_a_trial(width: int) -> None:
    trials = tuple(
        Trial(
            number=number,
            settings={"lr": 0.1 / (number + 1), "width": 64},
            state="failed" if number % 2 else "running",
            until=900,
            step=450,
            loss=1.234e-5,
            reason="RuntimeError: a long story of what has gone wrong, and where" if number % 2 else "",
        )
        for number in range(30)
    )
    console = Console(width=width, height=15, record=True, file=io.StringIO(), color_system=None)
    progress = SweepProgress(
        trials=trials, num_trials=64, steps=900, samples_per_s=1e6, serial_samples_per_s=1e5, wall_time_s=9.0
    )
    console.print(_table(progress, console))
    lines = console.export_text().splitlines()
    assert len(lines) <= 15
    assert all(len(line) <= width for line in lines)
    assert lines[-1].rstrip().endswith("9 s")
    assert "lr=0.1" in lines[1]
    assert "running" in lines[1]


def test_how_to_go_on_is_said_when_the_table_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def table() -> Iterator[Callable[[SweepProgress], None]]:
        try:
            yield lambda progress: signal.raise_signal(signal.SIGINT)
        finally:
            sys.stderr.write("the table is wiped out, and what was said below it\n")

    monkeypatch.setattr("burstpool.sweeping.runner._OBSERVE_S", -1.0)
    monkeypatch.setattr("burstpool.cli.sweep.live_table", table)
    folder = tmp_path / "my run"
    assert run(["sweep", EXAMPLE, "--set", "lr=0.1,0.2", "--run-folder", str(folder), *QUICK]) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith(f"go on with: burstpool sweep --resume '{folder}'")


def test_optuna_is_asked_for_in_one_line_where_it_is_absent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert run(["sweep", EXAMPLE, "--set", "lr=0.1", "--search", "optuna"]) == 2
    assert "pip install 'burstpool[optuna]'" in capsys.readouterr().err
