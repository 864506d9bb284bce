"""`burstpool share`, `burstpool interference` and `burstpool simulate --background`, as a user calls them."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_share_cpu import array_alone

from burstpool.cli.app import run
from burstpool.cli.share import background, known_gaps, spread
from burstpool.cluster.spec import ClusterSpec
from burstpool.job import load_job
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.run.even import even_plan
from burstpool.run.options import RunOptions
from burstpool.run.setup import Seat, set_up, trace_job
from burstpool.run.torchrun import Silent
from burstpool.run.trainer import InterruptedRun
from burstpool.run.worker import Task
from burstpool.schedule.lower import lower
from burstpool.share.base import Background, BackgroundOutcome, ShareOutcome, ShareRequest
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.keeper import Keeper
from burstpool.share.gpu.loop import alone_in_a_group
from burstpool.share.interference.table import COMMUNICATION, InterferenceTable, Pair
from burstpool.share.step_log import SHARING, StepLog, slowdowns

JOBS = str(Path(__file__).with_name("share_jobs.py"))


def first_loss() -> float:
    """Of the job in full precision."""
    job = load_job(JOBS)
    graph = trace_job(job).graph
    plan = even_plan(graph, num_devices=1, batch=job.batch, name=job.name)
    with alone_in_a_group() as control:
        seat = Seat(device=0, on=torch.device("cpu"), backend="gloo", control=control, doing=Silent())
        executor, loader = set_up(job, plan, lower(plan, graph), RunOptions(), seat)
        loss = executor.run(0, loader.load())
    assert loss is not None
    return loss.item()


def test_share_says_in_json_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burstpool.share.gates.keeper._LEAVE_S", 300.0)  # none is killed for being slow
    words = [
        "share",
        JOBS,
        "--with",
        f"{JOBS} lr=0.1,0.01",
        "--steps",
        "60",
        "--slowdown",
        "1.2",
        "--json",
        "--no-lowest-priority",
        "--autocast",
        "bf16",
    ]
    assert run([*words, "--run-folder", str(tmp_path / "run")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == len(found["losses"]) == 60
    assert {"slowdown", "slowdown_p95", "background_steps", "background_kept"} <= found.keys()
    log = StepLog.load(tmp_path / "run" / SHARING)
    assert len(log.times_s) == 60
    assert found["slowdown"] == pytest.approx(slowdowns(log)["slowdown"])
    assert found["slowdown"] > 0
    [array] = found["backgrounds"]
    assert array["state"] == "ended"
    assert len(array["losses"][0]) == 2
    # bf16 in both jobs: the first losses differ from the exact ones, by the little that such numbers are rounded.
    [exact] = array_alone(({"lr": "0.1"}, {"lr": "0.01"}), 1, tmp_path)
    for mine, theirs in ((found["losses"][0], first_loss()), (array["losses"][0][0], exact[0])):
        assert mine == pytest.approx(theirs, rel=0.02)
        assert mine != theirs
    assert array["folder"] == str(tmp_path / "run" / "background" / "0")
    assert run(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(words in page for words in ("Background jobs", "share_jobs ×2", "lr=0.01"))


def test_a_background_may_have_an_end_of_its_own() -> None:
    assert background("job.py lr=0.1,0.2 --steps 30").steps == background("job.py --steps=30 lr=0.1,0.2").steps == 30
    assert len(background("job.py lr=0.1,0.2 --steps 30").settings) == 2
    assert background("job.py lr=0.1").steps == Background(source="job.py").steps


def test_autocast_reaches_a_background_of_one_job(tmp_path: Path) -> None:
    keeper = Keeper(Background(source=JOBS), Gate.create(tmp_path / "gate"), tmp_path, autocast="bf16")
    task = keeper._prepare()
    assert isinstance(task, Task)
    assert task.options.autocast == "bf16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["share", JOBS], "say what to train beside it"),
        (["share", JOBS, "--with", "zoo:tiny_mlp", "--slowdown", "1"], "slowdown=1.0 must be more than 1"),
        (["share", JOBS, "--with", "zoo:tiny_mlp", "--autocast", "fp16"], "--autocast fp16 cannot be shared with"),
        (["share", JOBS, "--with", "zoo:tiny_mlp", "--device", "abacus"], "pass --device cpu"),
        (["share", JOBS, "--with", f"{JOBS} width=3", "--steps", "5"], "no hyper-parameter 'width'"),
        (["share", JOBS, "--with", "'zoo:tiny_mlp"], "cannot be read"),
        (["share", JOBS, "--with", ""], "--with '' names no job; e.g. --with 'job.py lr=0.1'"),
        (["share", JOBS, "--with", "--steps 5"], "--with '--steps 5' names no job"),
        (["share", JOBS, "--with", "zoo:tiny_mlp --steps"], "--with 'zoo:tiny_mlp --steps': --steps without a number"),
        (["share", JOBS, "--with", "zoo:tiny_mlp --steps=0"], "--with 'zoo:tiny_mlp --steps=0': --steps 0; e.g."),
        (["share", JOBS, "--with", "zoo:tiny_mlp --steps 1e3"], "--steps 1e3; e.g. --steps 500"),
        (["share", JOBS, "--with", "zoo:tiny_mlp --batch 4"], "--batch is no option of a background; --steps 500 is"),
        (["share", JOBS, "--with", "zoo:tiny_mlp lr"], "--with 'zoo:tiny_mlp lr': lr is not of the form name=value"),
        (["share", JOBS, "--with", "zoo:tiny_mlp", "--batch", "-5"], "--batch"),
        (["share", JOBS, "--with", "zoo:tiny_mlp", "--batch", "0"], "--batch"),
        (["share", JOBS, "--with", "zoo:tiny_mlp lr=0.1,0.2", "--batch", "1000000"], "pass a smaller batch"),
        *[
            (["share", JOBS, "--with", "zoo:tiny_mlp", "--memory", memory], f"--memory {memory} must be more than 0")
            for memory in ("nan", "inf", "0", "-5")
        ],
    ],
)
def test_mistakes_end_in_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not [record for record in caplog.records if record.name.startswith("burstpool")]  # those would be lines too
    assert not list(tmp_path.iterdir())  # nothing half-made, over which the same command would stumble


def test_an_interrupted_run_says_its_step_and_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(request: ShareRequest, **_: object) -> ShareOutcome:
        raise InterruptedRun(request.run_folder, 7)

    monkeypatch.setattr("burstpool.share.cpu.share_on_cpu", interrupted)
    assert run(["share", JOBS, "--with", JOBS, "--run-folder", str(tmp_path / "run")]) == 130
    assert f"stopped after step 7; what it has learnt is in {tmp_path / 'run'}" in capsys.readouterr().err


@pytest.mark.parametrize("slowdown", [1.005, 1.3])
def test_all_reduces_are_filled_where_the_table_says_that_it_is_harmless(
    slowdown: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(request: ShareRequest, **_: object) -> ShareOutcome:
        requests.append(request)
        raise InterruptedRun(request.run_folder, 0)

    requests: list[ShareRequest] = []
    monkeypatch.setattr("burstpool.share.cpu.share_on_cpu", noted)
    pair = Pair(foreground=COMMUNICATION, background="linear", slowdown=slowdown, kept=0.9)
    InterferenceTable(device="CPU", source="made up", pairs=(pair,)).save(tmp_path / "table.json")
    run(["share", JOBS, "--with", JOBS, "--interference", str(tmp_path / "table.json")])
    assert [request.budget.harmless_in_reduce for request in requests] == [slowdown < 1.01]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_before_the_foreground_began_nothing_is_left(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates: list[Path] = []

    def stopped(keepers: list[Keeper]) -> None:
        gates.extend(keeper.gate.path for keeper in keepers)
        assert gates[0].exists()
        os.kill(os.getpid(), number)

    monkeypatch.setattr("burstpool.share.gates.workers._started", stopped)
    monkeypatch.chdir(tmp_path)
    assert run(["share", JOBS, "--with", JOBS]) == 130
    assert capsys.readouterr().err == "burstpool: stopped; nothing was trained or written\n"
    assert not gates[0].parent.exists()
    assert not list(tmp_path.iterdir())


def test_stopped_while_a_gpu_is_made_ready_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        assert list(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("burstpool.share.cuda._Sharing", stopped)
    monkeypatch.chdir(tmp_path)
    assert run(["share", JOBS, "--with", JOBS, "--device", "cuda"]) == 130
    assert capsys.readouterr().err == "burstpool: stopped; nothing was trained or written\n"
    assert not list(tmp_path.iterdir())


def test_losses_that_are_no_numbers_are_null_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = BackgroundOutcome(
        name="array", device=0, steps=1, kept=None, alone_step_s=None, state="ended", reason="", restarts=0,
        evictions=0, losses=[[0.5, math.nan]],
    )  # fmt: skip
    outcome = ShareOutcome(
        folder=tmp_path, losses=(0.1, math.inf), step_time_s=0.1, slowdown=1.0, slowdown_p95=None, alone_p95=None,
        alone_step_s=None, backgrounds=(array,), timeline=None,
    )  # fmt: skip
    monkeypatch.setattr("burstpool.share.cpu.share_on_cpu", lambda *_, **__: outcome)
    assert run(["share", JOBS, "--with", JOBS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["losses"] == [0.1, None]
    assert found["backgrounds"][0]["losses"] == [[0.5, None]]
    StepLog(times_s=[0.1, math.nan]).save(tmp_path / "sharing.json")
    assert json.loads((tmp_path / "sharing.json").read_text(), parse_constant=pytest.fail)["times_s"] == [0.1, None]


def test_what_jobs_print_is_not_in_the_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(request: ShareRequest, **_: object) -> ShareOutcome:
        sys.stdout.write("from here\n")
        sys.stdout.flush()
        subprocess.run([sys.executable, "-c", "print('from a worker')"], check=True)
        return ShareOutcome(
            folder=request.run_folder, losses=(0.1,), step_time_s=0.1, slowdown=1.0, slowdown_p95=None, alone_p95=None,
            alone_step_s=None, backgrounds=(), timeline=None,
        )  # fmt: skip

    monkeypatch.setattr("burstpool.share.cpu.share_on_cpu", noisy)
    words = ["share", JOBS, "--with", JOBS, "--run-folder", str(tmp_path / "run")]
    assert run([*words, "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["loss"] == 0.1
    assert err.splitlines() == ["from here", "from a worker"]
    assert run(words) == 0
    assert capfd.readouterr().out.startswith("from here\nfrom a worker\nForeground: loss 0.1")


def test_values_of_settings_make_an_array_and_an_array_is_spread_over_devices() -> None:
    array = background("job.py lr=0.1,0.01,0.001 width=8,16", 100)
    assert len(array.settings) == 6
    assert array.memory_bytes == 100 << 20
    assert background("zoo:tiny_mlp").settings == ({},)
    parts = spread([array], 4)
    assert [len(part.settings) for part in parts] == [2, 2, 1, 1]
    assert sorted(map(str, array.settings)) == sorted(str(s) for part in parts for s in part.settings)
    assert spread([array, array], 4) == [array, array]


def test_one_device_has_no_gaps_and_several_may_wait() -> None:
    job = load_job(JOBS)
    graph = trace_job(job).graph
    plans = [even_plan(graph, num_devices=count, batch=job.batch, name="") for count in (1, 2)]
    assert known_gaps(plans[0], None) == ()
    assert [gap.length_s for gap in known_gaps(plans[1], None)] == [0.0]


def test_simulate_predicts_a_background_under_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layers = tuple(
        LayerProfile(
            name=name, inputs=(before,), parameter_bytes=4_000_000, output_bytes_per_sample=1000, kind=kind,
            forward_s={1: 1e-3, 64: 64e-3}, backward_s={1: 2e-3, 64: 128e-3},
        )
        for before, name, kind in (("x", "a", "conv2d"), ("a", "b", "linear"))
    )  # fmt: skip
    Profile(model="tiny", device="A100", source="made up", layers=layers).save("profile.json")
    ClusterSpec.uniform("A100", devices_per_node=4, link="nvlink3", name="four").save("cluster.toml")
    pair = Pair(foreground="convolution", background="linear", slowdown=1.4, kept=0.5)
    InterferenceTable(device="A100", source="made up", pairs=(pair,)).save("table.json")
    assert run(["plan", "profile.json", "--cluster", "cluster.toml", "--batch", "16", "-o", "plan.json"]) == 0
    capsys.readouterr()
    assert run(["simulate", "plan.json", "--background", "profile.json", "--json"]) == 2
    assert "--interference" in capsys.readouterr().err
    assert run(["simulate", "plan.json", "--background", "profile.json", "--interference", "table.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 < found["slowdown"] <= 1.10 + 1e-9
    assert 0 < found["background_kept"] < 1
    assert len(found["background_s"]) == 4
    assert found["sum_of_shares"] == pytest.approx(1 / found["slowdown"] + found["background_kept"])
