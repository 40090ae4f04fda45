"""The benchmarks of autocast run, their programs agree with dtypes placed by hand, and docs/autocast.md runs."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import autocast, autocast_models, autocast_tracing, hlo

ROOT = Path(__file__).parents[1]
SMALL = autocast_models.Sizes(batch_size=2, sequence=8, layers=1, width=64, vocabulary=32, image=8)


def program_of(fun, *args):
    return hlo.Program(jax.jit(fun).lower(*args).as_text("hlo"))


# Reading programs.


def test_products_are_counted_by_the_dtypes_of_their_operands_in_functions_and_loops_too():
    def fun(x, w):
        y = jax.jit(lambda a: a.astype(jnp.bfloat16) @ a.astype(jnp.bfloat16))(x)
        z, _ = jax.lax.scan(lambda carry, _: (carry @ w, None), x, length=3)
        return y.astype(jnp.float32) + z @ w

    x = jnp.ones((4, 4))
    assert program_of(fun, x, x).products() == Counter({"dot f32×f32": 2, "dot bf16×bf16": 1})


def test_casts_and_casts_that_undo_one_another_are_counted_and_integers_are_not():
    def fun(x, n):
        return x.astype(jnp.bfloat16).astype(jnp.float32) + n.astype(jnp.float32)

    program = program_of(fun, jnp.ones(4), jnp.ones(4, jnp.int32))
    assert program.converts() == Counter({"f32→bf16": 1, "bf16→f32": 1})
    assert program.round_trips() == 1
    assert program_of(lambda x: jnp.exp(x.astype(jnp.bfloat16)).astype(jnp.float32), jnp.ones(4)).round_trips() == 0


def test_convolutions_are_counted_and_traffic_is_what_other_operations_read_and_write():
    def fun(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, w = jnp.ones((1, 4, 4, 2), jnp.float16), jnp.ones((3, 3, 2, 2), jnp.float16)
    assert program_of(fun, x, w).products() == Counter({"convolution f16×f16": 1})
    assert program_of(fun, x, w).traffic() == (0, 0)
    assert program_of(jnp.exp, jnp.ones(8)).traffic() == (64, 0)


# The steps.


@pytest.mark.parametrize("name", autocast_models.NAMES)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_step_under_autocast_has_the_products_of_the_step_by_hand(name, policy):
    case = autocast_models.build(name, SMALL)
    products = {}
    for variant in ("float32", autocast.BY_HAND, autocast.AUTOCAST):
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam
            init, step = autocast.step_of(case, variant, policy)
            lowered = step.lower(jax.eval_shape(init), case.batch)
        products[variant] = hlo.Program(lowered.as_text("hlo")).products()
    half = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}[policy]
    assert products[autocast.AUTOCAST] == products[autocast.BY_HAND]
    assert {product.split()[1] for product in products[autocast.AUTOCAST]} == {f"{half}×{half}"}
    assert {product.split()[1] for product in products["float32"]} == {"f32×f32"}
    assert sum(products["float32"].values()) == sum(products[autocast.AUTOCAST].values())


def test_a_difference_between_programs_is_said_in_words():
    same = {"products": Counter({"dot bf16×bf16": 3}), "round_trips": 0}
    wider = {"products": Counter({"dot bf16×bf16": 2, "dot f32×f32": 1}), "round_trips": 2}
    assert autocast.differences({"lowered": same}, {"lowered": same}) == []
    assert autocast.differences({"lowered": same}, {"lowered": wider}) == [
        "lowered: 2 products dot bf16×bf16, by hand 3",
        "lowered: 1 products dot f32×f32, by hand 0",
        "lowered: 2 casts undo the cast before, by hand 0",
    ]


def test_goals_say_whether_they_are_met():
    rows = {autocast.BY_HAND: {"bytes": 100, "ratio": (1, 1, 1)}, autocast.AUTOCAST: {"bytes": 103, "ratio": (1, 1, 2)}}
    assert autocast.goals({"variants": rows, "differences": []}) == [
        "met: time is 1.0000 of by hand, the goal at most 1.01",
        "NOT MET: memory of the compiled step is 1.0300 of by hand, the goal at most 1.02",
        "met: the same products in the same dtypes as by hand, and no casts added that undo one another",
    ]


def test_the_benchmark_of_steps_writes_times_memory_and_programs_of_every_variant(tmp_path, capsys):
    config = autocast.Config(
        models=("lstm",), rounds=2, block_ms=1, sequence=8, layers=1, vocabulary=32, hlo=True, run_dir=tmp_path
    )
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        autocast.main(config)
    result = json.loads((tmp_path / "autocast.json").read_text())
    (model,) = result["results"]
    assert model["model"] == "LSTM, 1 layers of 64, 32 tokens, batch 2×8"
    assert list(model["variants"]) == list(autocast.VARIANTS)
    assert all(len(row["milliseconds"]) == 2 and row["bytes"] > 0 for row in model["variants"].values())
    losses = list(model["losses"].values())
    assert losses == pytest.approx([losses[0]] * 4, rel=0.05)  # all train alike
    markdown, printed = (tmp_path / "autocast.md").read_text(), capsys.readouterr().out
    for name in ("device", "versions", "date", "command"):
        assert f"- {name}: {result['environment'][name]}" in markdown
    for text in (*autocast.VARIANTS, "float32, lowered", "autocast, compiled", "the goal at most 1.01"):
        assert text in markdown and text in printed
    assert "dot(" in (tmp_path / "lstm-by_hand_again.lowered.txt").read_text()


def test_the_benchmark_of_tracing_writes_a_row_for_each_graph(monkeypatch, tmp_path):
    monkeypatch.setattr(autocast_tracing.gc, "collect", lambda: 0)  # seconds each beside the other tests
    config = autocast_tracing.Config(layers=1, rounds=1, equations=(16, 32), profile=True, run_dir=tmp_path)
    autocast_tracing.main(config)
    result = json.loads((tmp_path / "autocast_tracing.json").read_text())
    assert list(result["models"]) == ["loss", "value and gradients"]
    graphs = [(row["graph"], row["equations"]) for row in result["graphs"]]
    assert graphs == [("deep", 16), ("deep", 32), ("wide", 16), ("wide", 32)]
    assert "wide: the time per equation under autocast changes" in (tmp_path / "autocast_tracing.md").read_text()
    assert "transform.py" in (tmp_path / "profile.txt").read_text()


@pytest.mark.parametrize("make", [autocast_tracing.deep, autocast_tracing.wide])
def test_the_large_graphs_have_the_equations_they_are_named_for(make):
    fun, args = make(400)
    assert len(jax.make_jaxpr(fun)(*args).jaxpr.eqns) == pytest.approx(400, abs=1)


@pytest.mark.parametrize(
    ("main", "config", "text"),
    [
        (autocast.main, autocast.Config(rounds=-1), "--rounds must be at least 0, got -1"),
        (autocast.main, autocast.Config(width=65), "--width must be a multiple of 64, the width of a head, got 65"),
        (autocast_tracing.main, autocast_tracing.Config(equations=(3,)), "--equations must be at least 8, got 3"),
        (autocast_tracing.main, autocast_tracing.Config(policy="float8"), "float8"),
    ],
)
def test_a_bad_flag_ends_a_benchmark_with_one_line(main, config, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(config)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and text in said and said.count("\n") == 1


# The page.


def test_the_code_of_the_page_runs_as_printed(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "autocast.md").read_text(), re.DOTALL)
    scope = {}
    for block in blocks:
        exec(compile(block, "docs/autocast.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert len(blocks) == 5 and printed.startswith("float32 float32\nfloat32\n")
    assert "dot_general" in printed  # the plan


def test_the_pictures_of_the_page_are_drawn_from_the_graph_and_are_small(tmp_path):
    names = re.findall(r"!\[.*?\]\((.*?)\)", (ROOT / "docs" / "autocast.md").read_text())
    runpy.run_path(str(ROOT / "docs" / "draw_autocast.py"))["main"](tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for folder in (tmp_path, ROOT / "docs"):
        assert all(5_000 < (folder / name).stat().st_size < 300_000 for name in names)
