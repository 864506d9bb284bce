"""`burstpool plan` and `burstpool simulate`, run as a user would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from burstpool.cli.plan import plan
from burstpool.cli.simulate import simulate
from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import BurstpoolError, PlanError, ProfileError
from burstpool.plan.inputs import PlanInputs
from burstpool.plan.plan import Plan
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.report.timeline import Timeline

app = typer.Typer()
app.command()(plan)
app.command()(simulate)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds a profile and two clusters."""
    monkeypatch.chdir(tmp_path)
    layers = tuple(
        LayerProfile(
            name=name,
            inputs=(before,),
            parameter_bytes=4_000_000,
            output_bytes_per_sample=1000,
            forward_s={1: 1e-3, 64: 64e-3},
            backward_s={1: 2e-3, 64: 128e-3},
        )
        for before, name in (("x", "a"), ("a", "b"), ("b", "c"))
    )
    Profile(model="tiny", device="A100", source="made up", layers=layers).save("profile.json")
    ClusterSpec.uniform("A100", devices_per_node=4, link="nvlink3", name="four").save("cluster.toml")
    ClusterSpec.uniform("cpu-core", devices_per_node=2, link="pcie3", name="here").save("cpu.toml")
    return tmp_path


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs a command line in the folder; returns its standard output."""

    def run(line: str) -> str:
        app(line.split(), standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_plan_says_in_json_what_scripts_need(call: Callable[[str], str]) -> None:
    found = json.loads(call("plan profile.json --cluster cluster.toml --batch 16 --json"))
    assert found["strategy"] == "data"
    assert found["num_devices"] == 4
    assert found["step_time_s"] > 4 * 9e-3
    assert found["device_seconds"] == pytest.approx(4 * 4 * 9e-3, rel=0.01)
    assert found["planning_time_s"] > 0
    assert [layer for block in found["blocks"] for layer in block["layers"]] == ["a", "b", "c"]
    assert found["blocks"][0]["samples"] == [4, 4, 4, 4]


def test_plan_shows_a_picture_and_a_table(call: Callable[[str], str]) -> None:
    text = call("plan profile.json --cluster cluster.toml --batch 17")
    assert "tiny, batch 17, strategy data: 4 of 4 devices" in text
    assert "█" in text
    assert "4–5" in text
    assert "A step takes" in text


def test_a_plan_that_was_written_can_be_simulated_by_itself(call: Callable[[str], str]) -> None:
    assert "Written to out/plan.json" in call("plan profile.json --cluster cluster.toml --batch 16 -o out/plan.json")
    made = Plan.load("out/plan.json")
    found = json.loads(call("simulate out/plan.json --steps 2 --json -o timeline.json"))
    assert found["step_time_s"] == pytest.approx(made.step_time_s)
    assert found["device_seconds"] == pytest.approx(made.device_seconds)
    assert len(found["utilisation"]) == len(found["gaps_s"]) == len(found["gaps"]) == 4
    for share, gap_s in zip(found["utilisation"], found["gaps_s"], strict=True):
        assert share + gap_s / found["step_time_s"] == pytest.approx(1)
    timeline = Timeline.load("timeline.json")
    assert timeline.num_steps == 2
    assert timeline.step_time_s == found["step_time_s"]
    assert PlanInputs.load("out/plan.inputs.json").graph is None


def test_simulate_shows_a_picture(call: Callable[[str], str]) -> None:
    call("plan profile.json --cluster cluster.toml --batch 2 -o plan.json")
    text = call("simulate plan.json")
    assert "▒" in text
    assert "2 have nothing to do" in text


def test_simulate_takes_other_profiles_and_clusters(call: Callable[[str], str], folder: Path) -> None:
    call("plan profile.json --cluster cluster.toml --batch 16 -o plan.json")
    slow = ClusterSpec.uniform("A100", devices_per_node=4, link="pcie3", name="slow")
    slow.save("slow.toml")
    fast, other = (json.loads(call(f"simulate plan.json --json{more}")) for more in ("", " --cluster slow.toml"))
    assert other["step_time_s"] > fast["step_time_s"]
    (folder / "plan.inputs.json").unlink()
    with pytest.raises(PlanError, match=r"there is no plan\.inputs\.json to say .* give --profile and --cluster"):
        call("simulate plan.json --profile profile.json")
    again = json.loads(call("simulate plan.json --profile profile.json --cluster cluster.toml --json"))
    assert again == fast


def test_a_job_is_traced_and_measured_here(call: Callable[[str], str]) -> None:
    found = json.loads(call("plan zoo:tiny_mlp --cluster cpu.toml --batch 6 --json -o plan.json"))
    assert found["num_devices"] == 2
    assert found["step_time_s"] > 0
    inputs = PlanInputs.load("plan.inputs.json")
    assert inputs.graph is not None
    assert 3 in inputs.profiles[0].batches
    assert json.loads(call("simulate plan.json --json"))["step_time_s"] == pytest.approx(found["step_time_s"])


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("plan profile.json --cluster cluster.toml", PlanError, "give --batch: a profile does not say"),
        ("plan profile.json --cluster cluster.toml --batch 4 --set a=1", PlanError, "--set goes with a job"),
        ("plan profile.json --cluster cluster.toml --batch 4 --strategy magic", PlanError, "no strategy 'magic'"),
        (
            "plan profile.json --cluster cpu.toml --batch 4",
            ProfileError,
            "devices of type 'cpu-core', but profiles are",
        ),
        ("plan profile.json --cluster cluster.toml --batch 4000", ProfileError, "pass --extrapolate"),
        ("plan zoo:tiny_mlp --cluster cluster.toml --batch 4", ProfileError, "only a cluster of CPU workers can be"),
        ("plan profile.json --cluster nowhere.toml --batch 4", BurstpoolError, "cannot read nowhere.toml"),
        ("simulate nowhere.json", PlanError, "cannot read nowhere.json"),
    ],
)
def test_mistakes_end_in_one_line(call: Callable[[str], str], line: str, error: type[Any], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call(line)
    assert "\n" not in str(caught.value)


def test_extrapolation_is_remembered(call: Callable[[str], str]) -> None:
    call("plan profile.json --cluster cluster.toml --batch 4000 --extrapolate -o plan.json")
    assert json.loads(call("simulate plan.json --json"))["step_time_s"] > 9


def test_a_timeline_of_more_steps_than_memory_holds_is_refused_in_one_line(call: Callable[[str], str]) -> None:
    call("plan profile.json --cluster cluster.toml --batch 16 -o plan.json")
    with pytest.raises(
        PlanError, match=r"--steps 99999999999 of \d+ actions each are too many; give --steps \d+ or fewer"
    ):
        call("simulate plan.json --steps 99999999999")
