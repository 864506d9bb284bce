"""Curves of a sweep: which losses lie in the picture."""

from burstpool.report.sweep_contents import TrialCurve
from burstpool.report.sweep_curves import curves_picture, trial_curves


def trials(*losses: tuple[float, ...]) -> tuple[TrialCurve, ...]:
    return tuple(
        TrialCurve(number=number, name="lr=1", settings={}, state="done", losses=values, reports=())
        for number, values in enumerate(losses)
    )


def test_losses_below_zero_are_in_the_picture() -> None:
    curves = trial_curves(trials((-1.0, -2.0, -3.0), (-0.5, -1.0, -4.0)), 0)
    assert curves is not None
    assert [[len(stretch) for stretch in line.stretches] for line in curves.lines] == [[3], [3]]
    assert curves.num_cut == 0
    assert curves.values.low == -4.0
    assert all(0 <= curves.values.place(value) <= 1 for line in curves.lines for (_, value) in line.stretches[0])
    assert "nan" not in curves_picture(curves)[0]


def test_a_loss_that_rises_far_does_not_stretch_the_axis() -> None:
    curves = trial_curves(trials((2.0, 1.0, 0.5), (2.0, 3.0, 1e9)), 0)
    assert curves is not None
    assert (curves.values.low, curves.num_cut) == (0.0, 1)
    assert 2.29 < curves.values.high < 2.31


def test_a_curve_that_leaves_the_picture_is_not_drawn_across_what_is_outside() -> None:
    curves = trial_curves(trials((2.0, 1.0, 0.5, 0.4, 0.3, 0.2), (2.0, 1.9, 9.0, 9.0, 1.5, 1.4)), 0)
    assert curves is not None
    line = next(line for line in curves.lines if line.look == "done")
    assert [[step for step, _ in stretch] for stretch in line.stretches] == [[0.0, 1.0], [4.0, 5.0]]
    assert curves_picture(curves)[0].count("M") >= 3


def test_one_huge_loss_does_not_wipe_out_those_after_it() -> None:
    steady = (2.0,) * 100
    curves = trial_curves(trials(steady, (2.0, 1e30, *steady[2:])), 0)
    assert curves is not None
    line = next(line for line in curves.lines if line.look == "done")
    assert line.stretches[-1][-1] == (99.0, 2.0)
    assert all(abs(value - 2.0) < 1e-6 for _, value in line.stretches[-1])
