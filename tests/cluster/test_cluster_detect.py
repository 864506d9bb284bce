"""Detection on this machine, with real processes, and what happens when one of them fails."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import cluster_workers
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from burstpool.cli.cluster import cluster
from burstpool.cluster import detect as detect_module
from burstpool.cluster.detect import detect, num_cores
from burstpool.cluster.measure import DeviceRates, fit_link, run_workers
from burstpool.cluster.reductions import usual_s
from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import BurstpoolError, ClusterError
from burstpool.limits import machine_memory_bytes

pytestmark = pytest.mark.alone

app = typer.Typer()
app.command()(cluster)
run = CliRunner()


def test_detection_measures_this_machine_and_the_file_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turns in (2, 5, 8):  # other load may spoil one measurement, and hardly several, each longer than the last
        for module in ("reductions", "messages"):
            monkeypatch.setattr(f"burstpool.cluster.{module}._TRIES", 1)  # more are for accuracy
            monkeypatch.setattr(f"burstpool.cluster.{module}._TURNS", turns)
        steps: list[str] = []
        found = detect(device="cpu", num_devices=2, progress=steps.append)
        assert found.num_devices == 2
        assert found.homogeneous
        assert found.device_type("cpu-core").memory_bytes == machine_memory_bytes() // 2
        link = found.link(0, 1)
        assert link.source.startswith("measured: gloo")
        assert len(steps) == 3
        assert link.shares_compute
        times = list(link.reduce_s[2].values())
        assert times == sorted(times)
        assert ClusterSpec.load(found.save(tmp_path / "cluster.toml")) == found
        assert not multiprocessing.active_children()
        if not (figures := implausible(found)):
            return
    pytest.fail(f"figures of no machine: {figures}")


def implausible(found: ClusterSpec) -> dict[str, float]:
    """Figures far below or above any core's: a unit slipped, or a measurement of nothing, would fall outside."""
    core, link = found.device_type("cpu-core"), found.link(0, 1)
    fp32, fp64 = core.flops_per_s["fp32"], core.flops_per_s["fp64"]
    smallest_s, *_, largest_s = link.reduce_s[2].values()
    assert core.memory_bytes_per_s is not None
    figures = {
        "fp32": (fp32, 1e8 < fp32 < 1e12),
        # Half on an idle core; the two are measured one after the other, so other load can bring them together.
        "fp64": (fp64, 0 < fp64 < 1.5 * fp32),
        "memory": (core.memory_bytes_per_s, 1e8 < core.memory_bytes_per_s < 1e12),
        "link": (link.bytes_per_s, 1e6 < link.bytes_per_s < 1e12),
        "latency": (link.latency_s, 0 <= link.latency_s < 0.1),
        "sending": (link.send_s, 0 < link.send_s < 0.1),
        "reducing 1 KiB": (smallest_s, 0 <= smallest_s < 1),
        "reducing 16 MiB": (largest_s, largest_s > 1e-4),
    }
    return {name: figure for name, (figure, is_plausible) in figures.items() if not is_plausible}


def test_without_measuring_the_catalogue_speaks_and_says_so() -> None:
    found = detect(measure=False, device="cpu", num_devices=2 * num_cores())
    core = found.device_type("cpu-core")
    assert "assumed, not measured" in core.source
    assert core.flops_per_s["fp32"] == pytest.approx(24e9)  # two workers share a core
    assert found.link(0, 1).source == "loopback, assumed"


def test_one_worker_needs_no_link() -> None:
    found = detect(measure=False, device="cpu", num_devices=1)
    assert found.nodes()[0].link is None


def test_impossible_numbers_of_devices_are_refused() -> None:
    with pytest.raises(ClusterError, match="--devices 0 makes no cluster"):
        detect(num_devices=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there_is_refused() -> None:
    with pytest.raises(ClusterError, match="torch sees no CUDA device here"):
        detect(device="cuda")


class FakeGpus:
    """Stands in for torch.cuda on a machine of several GPUs, which no test machine has."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.names)

    def get_device_name(self, index: int) -> str:
        return self.names[index]

    def get_device_properties(self, index: int) -> object:
        class Properties:
            total_memory = 42_000_000_000
            multi_processor_count = 108

        return Properties()


def test_gpus_are_matched_by_name_and_runs_of_one_type_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", FakeGpus(["NVIDIA A100-SXM4-40GB"] * 2 + ["Tesla T4", "NVIDIA A100-SXM4-40GB"]))
    found = detect(measure=False)
    assert [device.type for device in found.devices] == ["A100", "A100", "T4", "A100"]
    assert found.device_type("A100").memory_bytes == 42_000_000_000
    assert found.device_type("A100").flops_per_s["bf16"] == 312e12
    assert found.link(0, 3).source == "pcie4, assumed"
    assert detect(measure=False, num_devices=3).num_devices == 3
    with pytest.raises(ClusterError, match="--devices 5 are more than the 4 GPUs"):
        detect(num_devices=5)


def test_a_gpu_the_catalogue_lacks_is_measured_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", FakeGpus(["NVIDIA H100 PCIe"]))
    with pytest.raises(ClusterError, match="GPU 'NVIDIA H100 PCIe' is not in the catalogue, so it must be measured"):
        detect(measure=False)
    rates = DeviceRates(flops_per_s={"fp32": 40.123456e12}, copy_bytes_per_s=1.5e12)
    monkeypatch.setattr(detect_module, "cuda_rates", lambda index, timeout_s: rates)
    found = detect().device_type("NVIDIA H100 PCIe")
    assert found.flops_per_s == {"fp32": 40.12e12}
    assert found.memory_bytes_per_s == 1.5e12


def test_workers_answer_by_rank() -> None:
    assert run_workers(cluster_workers.echo, 2, "worker", what="echo", timeout_s=60) == ["worker 0", "worker 1"]


@pytest.mark.parametrize(
    ("work", "timeout_s", "expected"),
    [
        (cluster_workers.fail_second, 60, "test: worker 1 failed: RuntimeError: no luck"),
        (cluster_workers.die, 60, r"test: worker \d died with exit code 7 before it answered"),
        (cluster_workers.sleep_second, 1, r"test: worker (0 and worker )?1 did not answer within 1 s"),
    ],
)
def test_a_worker_that_fails_is_named_and_none_is_left(work: object, timeout_s: float, expected: str) -> None:
    with pytest.raises(ClusterError, match=f"^{expected}"):
        run_workers(work, 2, what="test", timeout_s=timeout_s)  # type: ignore[arg-type]
    assert not multiprocessing.active_children()


@given(
    st.floats(min_value=1e-7, max_value=1e-2),
    st.floats(min_value=1e7, max_value=1e12),
    st.lists(st.integers(1, 1 << 28), min_size=2, max_size=8, unique=True),
)
def test_the_fit_finds_a_line_that_is_there(latency_s: float, bytes_per_s: float, sizes: list[int]) -> None:
    seconds = {size: latency_s + size / bytes_per_s for size in sizes}
    fitted_bytes_per_s, fitted_latency_s = fit_link(seconds)
    for size, expected_s in seconds.items():
        # 1e-6: the sums cancel by up to the ratio of the times, at most 1e9 here, over doubles' 1e-16.
        assert fitted_latency_s + size / fitted_bytes_per_s == pytest.approx(expected_s, rel=1e-6)


def test_a_disturbed_try_does_not_count() -> None:
    assert usual_s([1.0, 1.4]) == pytest.approx(1.2)
    assert usual_s([20.0, 1.0]) == pytest.approx(1.0)
    assert usual_s([0.0, 0.0]) == 0.0


def test_the_fit_survives_times_that_do_not_grow() -> None:
    assert fit_link({1: 2e-3, 1000: 1e-3}) == (1e6, 2e-3)
    with pytest.raises(ValueError, match="two sizes or more"):
        fit_link({1: 1.0})


def test_the_command_shows_a_file() -> None:
    file = Path(__file__).parents[2] / "examples" / "clusters" / "hetpipe.toml"
    result = run.invoke(app, [str(file)])
    assert result.exit_code == 0
    assert "hetpipe: 16 devices in 4 nodes" in result.stdout
    assert "4 × Quadro P4000" in result.stdout
    assert "Between nodes: 6.82 GB/s, 18 µs" in result.stdout


def test_the_command_prints_the_cluster_as_json_and_progress_elsewhere(tmp_path: Path) -> None:
    written = tmp_path / "cluster.toml"
    options = ["--detect", "--device", "cpu", "--devices", "2", "--no-measure", "--json", "-o", str(written)]
    result = run.invoke(app, options)
    assert result.exit_code == 0, result.output
    assert ClusterSpec.from_json(result.stdout) == ClusterSpec.load(written)
    assert json.loads(result.stdout)["node_groups"][0]["devices"] == [{"type": "cpu-core", "count": 2}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give either a cluster file or --detect"),
        (["x.toml", "--detect"], "give either a cluster file or --detect"),
        (["x.toml", "-o", "y.toml"], "go with --detect"),
        (["x.toml", "--devices", "0"], "go with --detect"),
        (["--detect", "--device", "tpu"], "--device tpu is unknown; give auto, cpu, cuda"),
        (["none.toml"], "cannot read none.toml: No such file"),
    ],
)
def test_the_commands_mistakes_are_errors_of_ours(arguments: list[str], expected: str) -> None:
    result = run.invoke(app, arguments)
    assert isinstance(result.exception, BurstpoolError)
    assert expected in str(result.exception)


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(ClusterSpec.uniform("A100", devices_per_node=1, name="[red]x[/red]").to_toml())
    assert "[red]x[/red]: 1 device in 1 node" in run.invoke(app, [str(file)]).stdout


def test_showing_a_file_imports_no_torch() -> None:
    code = "import sys, burstpool.cli.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_detection_finds_and_measures_a_real_gpu() -> None:
    found = detect(device="cuda", num_devices=1)
    assert found.num_devices == 1
    figures = found.device_type(found.devices[0].type)
    assert figures.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert "matrix products reached" in figures.source
    assert not multiprocessing.active_children()
