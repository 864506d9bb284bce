"""The command line: what people see, one line for a mistake, one JSON object for machines."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from burstpool.cli.app import app, run
from burstpool.cli.demo_share import arrays_s
from burstpool.cluster.spec import ClusterSpec
from burstpool.profiling.profile import Profile
from burstpool.run.machine import this_machine
from burstpool.share.base import BackgroundOutcome


def test_profile_shows_a_table_and_writes_a_profile_that_loads_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    assert run(["profile", "zoo:tiny_mlp", "--batches", "1,2", "--set", "width=8", "-o", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "layers.1" in shown
    assert "batch 2" in shown
    assert "sum/whole" in shown
    profile = Profile.load(path)
    assert profile.batches == (1, 2)
    assert run(["profile", str(path), "--json"]) == 0
    assert Profile.from_json(capsys.readouterr().out) == profile


def test_profile_json_is_one_object_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "zoo:tiny_mlp", "--batches", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "tiny_mlp"


def test_profile_imports_and_estimates_measurements_of_others(
    shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shared_data / "deeppool_a100" / "A100_vgg.prof"
    assert run(["profile", str(source), "--estimate", "V100"]) == 0
    shown = capsys.readouterr().out
    assert "on V100" in shown
    assert "estimated from A100" in shown


def test_what_the_demo_compares_sharing_with_has_the_arrays_side_by_side() -> None:
    outcome = BackgroundOutcome(
        name="", device=0, steps=30, kept=None, alone_step_s=0.1, state="ended", reason="", restarts=0, evictions=0,
        losses=[],
    )  # fmt: skip
    assert arrays_s([outcome] * 4, cores=2) == pytest.approx(6.0)
    assert arrays_s([outcome] * 4, cores=8) == pytest.approx(3.0)
    assert arrays_s([], cores=2) == 0


def test_demo_tells_the_story(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How a machine is measured has tests of its own.
    monkeypatch.setattr("burstpool.run.machine.this_machine", functools.partial(this_machine, measure=False))
    folder = tmp_path / "demo"
    words = ["demo", "zoo:tiny_mlp", "--devices", "2", "--steps", "6", "--trials", "6", "--run-folder", str(folder)]
    assert run([*words, "--json"]) == 0
    printed, shown = capsys.readouterr()
    assert "traced into layers" in shown
    assert "A sample costs" in shown
    assert "devices × layers" in shown  # the skyline
    assert "losses differ by" in shown
    ways = json.loads(printed)["burst"]
    assert set(ways) == {"data parallel", "burst"}
    for figures in ways.values():
        assert 0 < figures["predicted_step_time_s"] <= figures["least_step_time_on_these_cores_s"]
        assert figures["measured_step_time_s"] > 0
        assert "predicted and measured" in Path(figures["report"]).read_text()
    assert ways["burst"]["last_loss"] == pytest.approx(ways["data parallel"]["last_loss"], rel=1e-2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fly"], "No such command 'fly'"),
        (["profile"], "Missing argument 'JOB'"),
        (["profile", "zoo:tiny_mlp", "--wings", "2"], "No such option"),
        (["profile", "zoo:none"], "the zoo has no 'none'"),
        (["profile", "zoo:tiny_mlp", "--batches", "1,two"], "--batches 1,two is not a list of whole numbers"),
        (["profile", "zoo:tiny_mlp", "--set", "width"], "name=value"),
        (["profile", "zoo:tiny_mlp", "--set", "width=wide"], "width=wide for zoo:tiny_mlp"),
        (["profile", "zoo:tiny_mlp", "--device", "cuda:77"], "this machine has"),
        (["profile", "zoo:tiny_mlp", "--autocast", "fp4"], "autocast='fp4' is not one of"),
        (["profile", "zoo:tiny_mlp", "--fallback", "hope"], "the only fallback is modules"),
        (["profile", "zoo:tiny_mlp", "--threads", "0"], "--threads"),
        (["profile", "none.json"], "cannot read none.json"),
        (["cluster", "none.toml"], "none.toml"),
        (["train", "zoo:tiny_mlp", "--devices", "1", "--batch", "-3"], "--batch"),
        (["train", "zoo:tiny_mlp", "--devices", "1", "--batch", "0"], "--batch"),
        (["train", "zoo:tiny_mlp", "--devices", "1", "--batch", "10" * 12], "less than or equal to 16777216"),
        (["train", "zoo:tiny_mlp", "--devices", "99999999999"], "more workers than this machine's memory holds; give"),
        (["train", "zoo:tiny_mlp", "--devices", "99999999999", "--no-measure"], "memory holds; give --devices"),
        (
            ["share", "zoo:tiny_mlp", "--with", "zoo:tiny_mlp", "--devices", "99999999999"],
            "memory holds; give --devices",
        ),
        (["share", "zoo:tiny_mlp", "--with", "zoo:tiny_mlp", "--batch", "10" * 12], "less than or equal to 16777216"),
        (["share", "zoo:tiny_mlp", "--with", "zoo:tiny_mlp width=[8"], "width=[8: a bracket is not closed"),
        (["cluster", "--detect", "--device", "cpu", "--devices", "99999999999"], "memory holds; give --devices"),
        (["profile", "zoo:tiny_mlp", "--batches", "99999999999"], "at most 16777216; pass e.g. batches=[1, 2, 4]"),
        (["sweep", "zoo:tiny_mlp", "--set", "lr=0.1", "--batch", "10" * 12], "must be at most 16777216"),
        (["sweep", "zoo:tiny_mlp", "--set", "lr=0.1", "--threads", "99999999999"], "must be at most 1024"),
        (
            ["sweep", "zoo:tiny_mlp", "--set", "lr=float:0..1", "--search", "random", "--trials", "10" * 8],
            "trials are more than a sweep can write down; give --trials 1000000 or fewer",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("burstpool: error: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("batch", [10**15, 10**24])
def test_a_plan_for_a_batch_that_no_machine_can_hold_is_one_line(
    batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.toml"
    ClusterSpec.uniform("cpu-core", devices_per_node=2, link="pcie3", name="here").save(cluster)
    assert run(["plan", "zoo:tiny_mlp", "--cluster", str(cluster), "--batch", str(batch)]) == 2
    assert "Input should be less than or equal to 16777216" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["profile", "zoo:tiny_mlp", "--batches", "1,5000"],
        ["sweep", "zoo:tiny_mlp", "--set", "lr=0.1", "--batch", "5000"],
    ],
)
def test_a_batch_that_is_too_large_for_this_machine_says_so(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("burstpool.job.available_bytes", lambda: 2**20)
    assert run([*words, "--no-cache"] if words[0] == "profile" else words) == 2
    error = capsys.readouterr().err
    assert "memory runs out at batch 5000 of job 'tiny_mlp': its samples alone need" in error
    assert "try smaller batches" in error
    assert "Traceback" not in error


def test_a_layer_that_is_too_large_for_this_machine_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("burstpool.profiling.measure.available_bytes", lambda: 2**10)
    assert run(["profile", "zoo:tiny_mlp", "--batches", "64", "--no-cache"]) == 2
    assert "tiny_mlp runs out of memory at batch 64: one layer needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 25 bytes")],
)
def test_memory_that_runs_out_anywhere_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("burstpool.job.load_job", fails)
    assert run(["profile", "zoo:tiny_mlp"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("burstpool: error: memory ran out; try smaller numbers")
    assert shown.count("\n") == 1


def test_what_cannot_be_traced_is_one_line_too_and_the_fallback_that_it_names_helps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        "import torch\nfrom burstpool import Job\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) if x.sum() > 0 else x\n"
        "def job():\n"
        "    data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 4))\n"
        "    return Job(model=lambda: Net(4, 4), loss=torch.nn.functional.mse_loss, data=data,\n"
        "               optimizer=lambda p: torch.optim.SGD(p, lr=0.1))\n"
        "print('a job may print; who reads --json does not see it')\n"
    )
    ClusterSpec.uniform("cpu-core", devices_per_node=2, link="pcie3", name="here").save(tmp_path / "cluster.toml")
    command = [sys.executable, "-c", "from burstpool.cli import main; main()", "plan", str(path), "--json"]
    command += ["--cluster", str(tmp_path / "cluster.toml"), "--batch", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 2  # the job's own line, and ours
    assert f"{path}:5" in done.stderr
    assert done.stderr.endswith("or pass --fallback modules\n")
    assert run([*command[3:], "--fallback", "modules"]) == 0
    assert [block["layers"] for block in json.loads(capfd.readouterr().out)["blocks"]] == [["Net"]]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    shown = capsys.readouterr().out
    for command in app.registered_commands:
        assert command.callback is not None
        assert command.callback.__name__ in shown
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip().count(".") == 2


def test_an_unwritable_output_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["profile", "zoo:tiny_mlp", "--batches", "2", "-o", str(tmp_path / "file" / "x.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("start", [["-c", "from burstpool.cli import main; main()"], ["-m", "burstpool"]])
def test_the_installed_command_ends_with_the_status(start: list[str]) -> None:
    done = subprocess.run([sys.executable, *start, "profile", "zoo:none"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("burstpool: error: ")


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    layer = {
        "name": "a", "inputs": ["input"], "parameter_bytes": 4, "output_bytes_per_sample": 4,
        "forward_s": {"1": 1.0}, "backward_s": {"1": 1.0},
    }  # fmt: skip
    found = {"schema_version": 1, "model": "m", "device": "A100", "source": "nobody", "layers": [layer]}
    (tmp_path / "profile.json").write_text(json.dumps(found))
    return tmp_path / "profile.json"


@pytest.mark.parametrize("options", ["", "--json"])
@pytest.mark.parametrize(
    ("streams", "status", "says"),
    [
        ("2>&-", 0, ""),
        (">&-", 0, ""),
        ("<&-", 0, ""),
        pytest.param(
            "> /dev/full",
            2,
            "burstpool: error: cannot write what came of it: No space left on device\n",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full"),
        ),
        ("| true; exit ${PIPESTATUS[0]}", 1, ""),
    ],
)
def test_closed_full_and_broken_streams_are_no_traceback(
    options: str, streams: str, status: int, says: str, profile_file: Path
) -> None:
    script = f'"$0" -m burstpool profile "$1" {options} {streams}'
    words = ["bash", "-c", script, sys.executable, str(profile_file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, says)
    assert streams != "2>&-" or "A100" in done.stdout


def test_json_comes_alone_also_where_standard_error_is_closed(tmp_path: Path) -> None:
    script = '"$0" -m burstpool train zoo:tiny_mlp --devices 1 --no-measure --steps 2 --json --run-folder "$1" 2>&-'
    command = ["bash", "-c", script, sys.executable, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["steps"] == 2
