"""The picture of a run's loss scale."""

from experiments.report import plots

STEPS = [{"step": n, "loss_scale": 2.0 ** (15 - (n > 4)), "skipped": int(n == 4)} for n in range(9)]


def test_a_timeline_has_the_scale_of_each_step_and_marks_those_that_were_skipped():
    page = plots.loss_scale(STEPS)
    scale, skipped = page.axes[0].lines
    assert [*zip(scale.get_xdata(), scale.get_ydata(), strict=True)] == [(r["step"], r["loss_scale"]) for r in STEPS]
    assert (skipped.get_xdata(), skipped.get_ydata()) == ((4.0,), (2.0**15,))
    assert page.get_suptitle() == "1 of 9 steps was skipped; the loss scale went from 2^15 to 2^14"
    (alone,) = plots.loss_scale(STEPS[:1]).axes[0].lines
    assert alone.get_marker() == "o" and scale.get_marker() == "None"  # a line needs two points
