"""The plots show the measured values, and their titles state the result."""

import dataclasses

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import cli
from jaxmp.inspect import Memory, Watch, compare, error_budget, memory, numerics, plots
from jaxmp.inspect.counts.statistics import statistics_of

pytestmark = pytest.mark.once


def bars(axes):
    """Return the rectangles whose area is not zero."""
    return [patch for patch in axes.patches if patch.get_width() * patch.get_height()]


def texts(page):
    return [text.get_text() for axes in page.axes for text in axes.texts]


X = np.float32([2.0**-30, 2.0**-25, 1.5 * 2.0**-25, 2.0**-20, 2.0**-3, 3.0, 2.0**17, 0.0])


def test_a_histogram_has_a_bar_of_the_right_height_and_colour_for_each_exponent():
    statistics = statistics_of(X)
    page = plots.exponents(statistics)
    drawn = {bar.get_x(): (bar.get_height(), bar.get_facecolor()) for bar in bars(page.axes[0])}
    assert {e: height for e, (height, _) in drawn.items()} == {e: 12.5 * n for e, n in statistics.histogram.items()}
    assert drawn[-25][0] == 25.0
    colors = [drawn[e][1] for e in (-30, -20, -3, 17)]
    assert len({*colors}) == 4 and drawn[1][1] == drawn[-3][1]
    assert page.get_suptitle() == "12.5% of the values become 0 in float16; 12.5% of the values overflow"
    assert "12.5% become 0\n37.5% subnormal\n12.5% overflow\n12.5% were 0" in texts(page)


def test_a_loss_scale_moves_the_bars_and_leaves_the_line_of_what_was():
    statistics = statistics_of(X[:5])
    page = plots.exponents({"a": statistics}, "bfloat16", loss_scale=8)
    assert [text.get_text() for text in page.axes[0].get_legend().get_texts()] == ["without the loss scale"]
    assert sorted(bar.get_x() for bar in bars(page.axes[0])) == [e + 3 for e in sorted(statistics.histogram)]
    (line,) = [line for line in page.axes[0].lines if len(line.get_xdata()) > 2]
    before = {x: y for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True) if y}
    assert before == {e: 100 * count / 5 for e, count in statistics.histogram.items()}
    assert page.get_suptitle() == "Nothing becomes 0 in bfloat16"
    page = plots.exponents(statistics_of(X[:0]), loss_scale=8)  # without values
    assert not bars(page.axes[0]) and page.get_suptitle() == "Nothing becomes 0 in float16"


def test_a_step_is_drawn_by_kind_and_only_its_gradients_are_scaled():
    step_numerics = numerics(lambda w, x: 1e-9 * jnp.sum(x @ w))(concrete.ones((4, 2)), concrete.ones((3, 4)))
    page = plots.exponents(step_numerics, loss_scale=4)
    names = [axes.get_ylabel() for axes in page.axes[:-1]]
    assert names == ["weights", "gradients"]
    weights, gradients = ([bar.get_x() for bar in bars(axes)] for axes in page.axes[:2])
    assert weights == [0] and gradients == [np.floor(np.log2(3e-9 * 4))]
    assert page.get_suptitle().startswith("100% of the gradients become 0 in float16, 100% under a loss scale of 4")


@pytest.fixture(scope="module")
def watched():
    watch = Watch(lambda w, x: 1e-9 * jnp.sum(jnp.sin(x @ w["a"]) @ w["b"]), every=2)
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2))}
    for step in range(1, 7):
        watch(step, params, jnp.ones((5, 3)), loss_scale=4.0**step)
    return watch


def heat(axes):
    (mesh,) = axes.collections
    return np.asarray(mesh.get_array())


def test_a_heat_map_has_the_shares_of_each_tensor_by_step(watched):
    page = plots.underflow(watched, "gradients")
    shares = watched.shares("gradients")
    assert shares["a"][0] < shares["b"][0] == 1
    np.testing.assert_array_equal(heat(page.axes[0]), 100 * np.array([*shares.values()]))
    assert [text.get_text() for text in page.axes[0].get_yticklabels()] == ["a", "b"]
    assert [text.get_text() for text in page.axes[0].get_xticklabels()] == ["2", "4", "6"]
    assert page.get_suptitle() == "The gradients of b vanish most in float16: 100% at step 2"
    zeros = [
        [step.gradients[path].zeros / step.gradients[path].count for step in watched.steps.values()] for path in "ab"
    ]
    np.testing.assert_array_equal(heat(page.axes[1]), 100 * np.array(zeros))


def mlp(params, x):
    for name in ("one", "two"):
        with jax.named_scope(name):
            x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


PARAMS = {"one": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), "two": np.eye(8, dtype=np.float32)}


def test_errors_are_drawn_where_their_scopes_stand():
    comparison = compare(mlp, "mixed_bfloat16")(PARAMS, jnp.linspace(0, 1, 32).reshape(4, 8))
    page = plots.errors(comparison)
    scopes, arguments = page.axes
    labels = [text.get_text() for text in scopes.get_yticklabels()]
    assert labels == ["one", "two", "the result"]
    drawn = {(row.get_label(), labels[int(y)]): x
             for row in scopes.lines[1:] for x, y in zip(row.get_xdata(), row.get_ydata(), strict=True)}  # fmt: skip
    phases = {"forward": "forward", "backward": "gradient"}
    rows = [row for row in comparison.rows if row.path in ("one", "two", "")]
    assert drawn == {(phases[row.phase], row.path or "the result"): row.relative_error for row in rows}
    assert sorted(arguments.lines[1].get_xdata()) == sorted(r.relative_error for r in comparison.rows[-2:])
    assert scopes.lines[0].get_xdata()[0] == 2.0**-8  # the rounding error of bfloat16
    assert page.get_suptitle().replace("\n", " ") == comparison.headline
    comparison = compare(lambda x: jnp.exp(x), "mixed_float16", grad=False)(concrete.ones(3))
    (axes,) = plots.errors(comparison).axes  # no half dtype, so no line for its precision
    assert {row.dtype for row in comparison.rows} == {"float32"} and not axes.lines and axes.get_legend() is None


def test_a_budget_has_two_bars_for_each_module():
    budget = error_budget(mlp, "mixed_bfloat16")(PARAMS, jnp.linspace(0, 1, 32).reshape(4, 8))
    page = plots.budget(budget)
    (axes,) = page.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [g.name or "the result" for g in budget.by_path]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [g.error_alone for g in budget.by_path] + [g.error_in_float32 for g in budget.by_path]
    assert "of an error of" in page.get_suptitle()


def plan_of(peak, **kinds):
    return Memory("a GPU", peak, {**kinds, "temporaries": peak - sum(kinds.values())}, {"float32": peak}, (), 2, int)


def test_memory_is_drawn_by_kind_and_dtype():
    mib = 2**20
    plans = {"float32": plan_of(100 * mib, params=30 * mib), "half": plan_of(61 * mib, params=30 * mib)}
    page = plots.memory(plans)
    by_kind = sorted((bar.get_y() > 0.5, bar.get_x(), bar.get_width()) for bar in bars(page.axes[0]))
    assert by_kind == [(False, 0, 30), (False, 30, 70), (True, 0, 30), (True, 30, 31)]
    assert sorted(bar.get_width() for bar in bars(page.axes[1])) == [61, 100]
    assert " 61 (-39%)" in texts(page) and page.axes[1].get_xlabel() == "MiB at the peak"
    assert page.get_suptitle().splitlines()[1] == "half: 61.0 MiB at the peak on a GPU, batch of 2"
    mixed = dataclasses.replace(plans["half"], by_dtype={"bfloat16": 40 * mib, "float32": 21 * mib})
    drawn = bars(plots.memory({"mixed": mixed}).axes[1])
    first, last = (bar.get_facecolor() for bar in sorted(drawn, key=lambda bar: bar.get_x()))
    assert last == bars(page.axes[1])[0].get_facecolor() != first  # float32 has the same colour, also if it is smaller
    small = memory(lambda params, batch: (batch @ params).sum())(concrete.ones((8, 4)), concrete.ones((2, 8)))
    assert plots.memory({"it": small}).get_suptitle() == f"it: {small.headline}"


def test_the_commands_write_a_picture(tmp_path, monkeypatch):
    (tmp_path / "plotted.py").write_text(
        "import jax, numpy as np\n"
        "def loss_fn(w, x):\n    with jax.named_scope('layer'):\n        y = x @ w\n    return 1e-9 * y.sum()\n"
        "def args():\n    return np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)\n"
    )
    monkeypatch.chdir(tmp_path)
    for command in ("numerics", "compare", "memory"):
        policy = ["--policy", "mixed_bfloat16"] if command == "compare" else []
        options = ["--args", "plotted:args", "--plot", f"{command}.png", *policy]
        assert cli.main([command, "plotted:loss_fn", *options]) == 0
        assert (tmp_path / f"{command}.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_that_cannot_be_written_ends_the_command_before_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, phrase in (
        ("picture.abc", "ends in .png, .pdf or .svg, got 'picture.abc'"),
        ("picture", "ends in .png, .pdf or .svg, got 'picture'"),
        ("no/picture.png", "in an existing folder, got 'no/picture.png'; create the folder no"),
    ):
        assert cli.main(["memory", "nowhere:nothing", "--plot", name]) == 2
        out, err = capsys.readouterr()
        assert not out and phrase in err and not [*tmp_path.iterdir()]
