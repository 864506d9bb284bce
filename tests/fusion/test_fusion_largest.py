"""The search for the largest array of `benchmarks/fusion/largest.py`, and the memory that it pretends on the CPU."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fusion"
sys.path.append(str(BENCHMARK))  # at the end: hypothesis calls a test's body again and again, fixtures once

import largest  # noqa: E402
import memory_use  # noqa: E402
from search_size import Line, Tried, bounds, line_through, next_size, search  # noqa: E402
from workers import Crew  # noqa: E402
from workloads import CPU_WORKLOADS, task  # noqa: E402

MEMORY = 1_000_000
SMALL = (2, 4)


def stand_in(largest: int, line: Line, *, other_limit: int = 10**9) -> Callable[[int], Tried]:
    """A device on which `largest` members fit; more than `other_limit` fail by something else."""

    def attempt(members: int) -> Tried:
        by_memory = members <= other_limit
        fits = members <= largest and by_memory
        peak = int(line.fixed_bytes + line.member_bytes * members)
        return Tried(members=members, fits=fits, peak_bytes=peak if fits else 0, by_memory=by_memory)

    return attempt


@st.composite
def devices(draw: st.DrawFn) -> tuple[int, Line]:
    """How many fit, and a line of the measured peaks that may be far off."""
    largest = draw(st.integers(4, 5000))
    predicted = max(6, int(largest * draw(st.floats(0.3, 3.0))))
    fixed = draw(st.integers(0, MEMORY // 10))
    return largest, Line(fixed, (MEMORY - fixed) / predicted)


@given(device=devices(), tries=st.integers(0, 6), other=st.integers(5, 10_000))
def test_the_search_reports_only_what_it_saw_and_asks_no_size_twice(
    device: tuple[int, Line], tries: int, other: int
) -> None:
    largest, line = device
    attempt = stand_in(largest, line, other_limit=other)
    measured = [attempt(members) for members in SMALL]
    tried = search(attempt, measured, limit_bytes=MEMORY, tries=tries)
    sizes = [one.members for one in tried]
    assert len(tried) <= tries
    assert len(set(sizes)) == len(sizes)
    assert not set(sizes) & set(SMALL)
    fits, fails = bounds([*measured, *tried])
    really = min(largest, other)
    assert fits <= really
    assert fails is None or fails > really
    assert fits in (*SMALL, *sizes)


@settings(deadline=None)  # brute force
@given(device=devices(), other=st.integers(5, 10_000))
def test_with_enough_tries_the_search_ends_within_a_percent_of_brute_force(
    device: tuple[int, Line], other: int
) -> None:
    largest, line = device
    attempt = stand_in(largest, line, other_limit=other)
    measured = [attempt(members) for members in SMALL]
    tried = search(attempt, measured, limit_bytes=MEMORY, tries=200)
    assert len(tried) < 100
    brute = max(members for members in range(1, 5001) if attempt(members).fits)
    fits, fails = bounds([*measured, *tried])
    assert fails is not None
    assert fits <= brute < fails
    assert fits >= brute / 1.01 - 1


@given(largest=st.integers(40, 100_000), error=st.floats(-0.05, 0.03))
def test_four_tries_come_within_six_percent_where_the_line_is_off_by_a_few(largest: int, error: float) -> None:
    line = Line(0, MEMORY / (largest * (1 + error)))
    attempt = stand_in(largest, line)
    measured = [attempt(members) for members in SMALL]
    fits, _ = bounds([*measured, *search(attempt, measured, limit_bytes=MEMORY, tries=4)])
    assert fits >= 0.94 * largest - 1


def test_a_try_that_was_not_done_in_time_says_nothing_of_its_size() -> None:
    options: Any = SimpleNamespace(device="cpu", dtype="fp32", out="", hfta="", only=["tiny_mlp"], known=CPU_WORKLOADS)
    report, key = largest.Report(options, 0.0), ("tiny_mlp", "ours")
    for members in SMALL:
        report.add(report.measured, key, members, {"peak_bytes": 100 * members})
    report.add(report.tried, key, 100, {"error": "not done within 9 s", "by_memory": False, "late": True})
    report.add(report.tried, key, 50, {"peak_bytes": 5000})
    row = report.row(key)
    assert (row["largest"], row["smallest_not"]) == (50, None)


def test_a_line_needs_two_sizes_that_fitted() -> None:
    one = Tried(members=2, fits=True, peak_bytes=200)
    assert line_through([one]) is None
    assert line_through([one, Tried(members=9, fits=False)]) is None
    assert next_size([one], [], limit_bytes=MEMORY) is None
    assert line_through([one, Tried(members=4, fits=True, peak_bytes=300)]) == Line(100, 50)
    assert Line(100, 50).largest(1000) == 18


def test_pretended_memory_counts_what_is_alive_once_and_fails_beyond_its_limit() -> None:
    with memory_use.PretendedMemory(10_000) as memory:
        kept = torch.zeros(1000)
        assert memory.held_bytes == 4000
        view = kept.view(10, 100)[2:]
        assert memory.held_bytes == 4000
        del kept
        assert memory.held_bytes == 4000  # the view's
        del view
        assert memory.held_bytes == 0
        with pytest.raises(torch.OutOfMemoryError, match="12,000 bytes are held"):
            torch.ones(3000)
        assert memory.held_bytes == 0
        assert memory.peak_bytes == 12_000


def test_pretended_memory_counts_what_autograd_keeps() -> None:
    layer = nn.Linear(10, 10, bias=False)
    with memory_use.PretendedMemory(1 << 30) as memory:
        x = torch.ones(5, 10)
        y = layer(x).sigmoid().sum()
        assert memory.held_bytes == 400 + 200 + 200 + 4  # weights, x, the sigmoid's result for its gradient, the sum
        y.backward()
        assert memory.held_bytes == 400 + 200 + 4 + 400  # the gradient instead of what was kept for it


def test_a_grown_array_trains_as_one_that_was_fused_of_as_many_copies() -> None:
    made = task("tiny_resnet", torch.device("cpu"), None)
    arrays = [memory_use.grown(memory_use.fused_array(made, 2, "rules"), 5), memory_use.fused_array(made, 5, "rules")]
    assert [len(array) for array in arrays] == [5, 5]
    steps = [memory_use.recorded_array(made, array, compiled=False) for array in arrays]
    for _ in range(3):
        torch.testing.assert_close(*(step(made.inputs, made.target) for step in steps), rtol=1e-6, atol=1e-6)
    mine, theirs = (array.state.tensors for array in arrays)
    assert {key: t.shape for key, t in mine.items()} == {key: t.shape for key, t in theirs.items()}
    assert len({id(generator) for generator in arrays[0].streams.generators}) == 5


def test_losses_that_no_dropout_explains_are_refused() -> None:
    memory_use.check_alike(torch.tensor([2.3, 2.5, 2.2]))
    with pytest.raises(ArithmeticError, match="differ"):
        memory_use.check_alike(torch.tensor([2.3, 0.0, 2.3]))
    with pytest.raises(ArithmeticError, match="differ"):
        memory_use.check_alike(torch.tensor([2.3, float("nan"), 2.3]))


@pytest.mark.parametrize(
    ("error", "by_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: invalid configuration argument"), False),
    ],
)
def test_memory_that_is_missing_is_known_by_its_names(error: Exception, by_memory: bool) -> None:
    assert memory_use.ran_out(error) is by_memory


def test_a_size_that_does_not_fit_gives_its_memory_back_for_the_next() -> None:
    options = SimpleNamespace(device="cpu", dtype="fp32", limit_bytes=1_000_000)
    tasks: dict[str, object] = {}
    request = {"workload": "tiny_mlp", "way": "ours", "runs": 1}
    too_many = memory_use.answer({**request, "members": 100}, options, tasks)  # type: ignore[arg-type]
    assert too_many["by_memory"]
    few = memory_use.answer({**request, "members": 4}, options, tasks)  # type: ignore[arg-type]
    assert 4 * 4 * 8970 < few["peak_bytes"] < 1_000_000


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK / "largest.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def test_the_largest_array_is_found_between_one_that_trains_and_one_that_runs_out(tmp_path: Path) -> None:
    options = ("--limit-bytes", "3000000", "--only", "tiny_mlp", "--tries", "6", "--seconds", "800")
    done = run(*options, "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == found["rows"]
    ours, separate = found["rows"]
    assert ours["smallest_not"] == ours["largest"] + 1
    assert 0.9 * ours["largest"] <= ours["predicted"] <= 1.1 * ours["largest"]
    assert 2_500_000 < ours["peak_bytes"] <= 3_000_000
    assert separate["predicted"] > 10
    assert not separate["verified"]
    assert f"| tiny_mlp | {ours['largest']} |" in done.stderr


def test_time_that_is_up_is_said_and_leaves_no_figure() -> None:
    done = run("--limit-bytes", "3000000", "--only", "tiny_mlp,mlp784", "--seconds", "0.5")
    assert done.returncode == 0, done.stderr
    for row in json.loads(done.stdout)["rows"]:
        assert row["largest"] is None
        assert row["note"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--only nothing", "there is no 'nothing'"),
        ("", "--limit-bytes"),
        ("--limit-bytes 9 --hfta .", "--device cuda"),
        ("--device cuda --hfta nowhere", "nowhere is no checkout"),
    ],
)
def test_a_bad_option_ends_in_one_line(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["largest.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        largest.parsed()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_process_that_failed_is_replaced_and_one_that_ran_out_of_memory_goes_on(tmp_path: Path) -> None:
    crew = Crew(SimpleNamespace(device="cpu", dtype="fp32", limit_bytes=1_000_000, hfta="", log=""), tmp_path)  # type: ignore[arg-type]
    until = time.monotonic() + 600
    try:
        worker = crew.take()
        assert worker.ask("tiny_mlp", "ours", 100, until=until)["by_memory"]
        assert crew.usable(worker) is worker
        assert "LookupError" in worker.ask("tiny_mlp", "hfta", 2, until=until)["error"]
        other = crew.usable(worker)
        assert other is not worker
        assert "the process ended" in worker.ask("tiny_mlp", "ours", 2, until=until)["error"]
        assert other.ask("tiny_mlp", "limit", until=until)["limit_bytes"] == 1_000_000
    finally:
        crew.close()
