"""Backgrounds on CPU workers that fail, in real processes. Nothing here depends on how fast these are."""

from pathlib import Path

from share_alone import JOBS, wait_for

from burstpool.share.base import Background
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.keeper import Keeper


def test_a_background_that_is_killed_or_allocates_without_end_fails_alone_after_one_restart(tmp_path: Path) -> None:
    def keeper(what: str) -> Keeper:
        background = Background(
            source=JOBS,
            settings=({"what": what, "after": 200},),
            memory_bytes=256 << 20,
            lowest_priority=False,  # a busy machine would leave it hardly any time
        )
        return Keeper(background, Gate.create(tmp_path / f"gate-{what}"), tmp_path / what)

    keepers = {"SIGKILL": keeper("kill"), "memory": keeper("allocate")}
    for each in keepers.values():
        each.start()
    for words, each in keepers.items():
        assert each.join(600)
        assert each.kept.state == "failed"
        assert words in each.kept.reason
        assert each.kept.restarts == 1  # failing at the same step again is the end
        assert each.pid is None  # nothing is left behind


def test_a_background_whose_model_cannot_even_be_traced_fails_alone(tmp_path: Path) -> None:
    def keeper(what: str) -> Keeper:
        background = Background(source=JOBS, settings=({"what": what, "after": 1},), lowest_priority=False)
        return Keeper(background, Gate.create(tmp_path / f"gate-{what}"), tmp_path / what)

    killed, hung = keeper("kill"), keeper("hang")
    killed.start()
    hung.start()
    assert not killed.wait_until_prepared(120)
    assert killed.join(60)
    assert (killed.kept.state, killed.kept.restarts) == ("failed", 1)
    assert "was killed by SIGKILL" in killed.kept.reason
    wait_for(lambda: hung._doing() == "tracing the model")
    assert not hung.wait_until_prepared(0)
    assert hung.gate.is_away  # what it cannot use yet is the others'
    hung.stop()
    assert hung.kept.state == "failed"
    assert hung.kept.reason == "it was not ready when it was asked to end; it was tracing the model"
