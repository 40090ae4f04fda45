"""The benchmarks of autocast and of the first step, and docs/autocast.md."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import ROOT

from experiments.benchmarks import autocast, first_step, gpu, loss_scaling, numerics
from experiments.benchmarks.measure import programs
from experiments.benchmarks.models import by_hand
from jaxmp.inspect.compiled import hlo

NAMES = autocast.Config().models
SMALL = autocast.Config(batch_size=2, sequence=8, layers=1, width=64, vocabulary=64)


def program_of(fun, *args):
    return hlo.HloProgram(jax.jit(fun).lower(*args).as_text("hlo"))


# Reading programs.


def test_products_are_counted_by_the_dtypes_of_their_operands_in_functions_and_loops_too():
    def fun(x, w):
        y = jax.jit(lambda a: a.astype(jnp.bfloat16) @ a.astype(jnp.bfloat16))(x)
        z, _ = jax.lax.scan(lambda carry, _: (carry @ w, None), x, length=3)
        return y.astype(jnp.float32) + z @ w

    x = jnp.ones((4, 4))
    assert programs.products(program_of(fun, x, x)) == Counter({"dot f32×f32": 2, "dot bf16×bf16": 1})


def test_casts_and_casts_that_undo_one_another_are_counted_and_integers_are_not():
    def fun(x, n):
        return x.astype(jnp.bfloat16).astype(jnp.float32) + n.astype(jnp.float32)

    x = jnp.ones(4)
    program = program_of(fun, x, jnp.ones(4, jnp.int32))
    assert programs.casts(program) == Counter({"f32→bf16": 1, "bf16→f32": 1})
    assert programs.round_trips(program) == 1
    between = program_of(lambda x: jnp.exp(x.astype(jnp.bfloat16)).astype(jnp.float32), x)
    assert programs.round_trips(between) == 0


def test_convolutions_are_counted_and_traffic_is_what_other_operations_read_and_write():
    def fun(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, w = jnp.ones((1, 4, 4, 2), jnp.float16), jnp.ones((3, 3, 2, 2), jnp.float16)
    assert programs.products(program_of(fun, x, w)) == Counter({"convolution f16×f16": 1})
    assert programs.traffic(program_of(fun, x, w)) == (0, 0)
    assert programs.traffic(program_of(jnp.exp, jnp.ones(8))) == (64, 0)


# The steps.


@pytest.mark.slow("a part of a benchmark")
def test_no_line_of_jaxmp_runs_in_the_code_that_autocast_rewrites():
    for name in NAMES:
        case = autocast.case_of(name, SMALL)
        model = by_hand.build(case)
        params, state = jax.eval_shape(functools.partial(by_hand.init, case, model), jax.random.key(0))
        called = set()
        sys.setprofile(lambda frame, event, arg, called=called: called.add(frame.f_code.co_filename))
        try:
            jax.eval_shape(by_hand.loss_fn_of(model), params, state, case.batch)
        finally:
            sys.setprofile(None)
        assert by_hand.__file__ in called and not [file for file in called if str(ROOT / "jaxmp") in file]


@pytest.mark.slow("a part of a benchmark")
def test_the_lstm_computes_what_flaxs_own_computes():
    dtype = jnp.float32
    xs = jax.random.normal(jax.random.key(0), (5, 2, 4), dtype)
    ours = by_hand.Recurrence(dtype)
    params = ours.init(jax.random.key(1), xs)["params"]
    gates = {"kernel": jnp.split(params["outer"]["kernel"], 4, axis=1), "inner": jnp.split(params["inner"], 4, axis=1)}
    theirs = {f"i{gate}": {"kernel": kernel} for gate, kernel in zip("ifgo", gates["kernel"], strict=True)}
    for gate, kernel in zip("ifgo", gates["inner"], strict=True):
        theirs[f"h{gate}"] = {"kernel": kernel, "bias": jnp.full(4, float(gate == "f"))}
    flax = nn.RNN(nn.LSTMCell(4), time_major=True).apply({"params": {"cell": theirs}}, xs.astype(jnp.float32))
    got = ours.apply({"params": params}, xs)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(jnp.float32), flax, atol=2 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize(("name", "policy"), [("bert", "mixed_bfloat16"), ("lstm", "mixed_float16")])
@pytest.mark.slow("a part of a benchmark")
def test_a_step_under_autocast_has_the_products_of_the_step_by_hand(name, policy):
    case = autocast.case_of(name, SMALL)
    products = {}
    for variant in ("float32", autocast.BY_HAND, autocast.AUTOCAST):
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam
            init, step = autocast.step_of(case, variant, policy)
            lowered = step.lower(jax.eval_shape(init), case.batch)
        products[variant] = programs.products(hlo.HloProgram(lowered.as_text("hlo")))
    half = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}[policy]
    assert products[autocast.AUTOCAST] == products[autocast.BY_HAND]
    assert {product.split()[1] for product in products[autocast.AUTOCAST]} == {f"{half}×{half}"}
    assert {product.split()[1] for product in products["float32"]} == {"f32×f32"}
    assert sum(products["float32"].values()) == sum(products[autocast.AUTOCAST].values())


def test_differences_between_programs_are_described_and_goals_say_whether_they_are_met():
    same = {"products": Counter({"dot bf16×bf16": 3}), "round_trips": 0}
    wider = {"products": Counter({"dot bf16×bf16": 2, "dot f32×f32": 1}), "round_trips": 2}
    assert autocast.differences({"lowered": same}, {"lowered": same}) == []
    assert autocast.differences({"lowered": same}, {"lowered": wider}) == [
        "lowered: 2 dot bf16×bf16 for 3, 1 dot f32×f32 for 0",
        "lowered: 2 casts undo the cast before, by hand 0",
    ]

    rows = {autocast.BY_HAND: {"bytes": 100, "ratio": (1, 1, 1)}, autocast.AUTOCAST: {"bytes": 103, "ratio": (1, 1, 2)}}
    assert autocast.goals({"variants": rows, "differences": []}) == [
        "met: time / by hand's is 1.0000, the goal at most 1.01",
        "NOT MET: memory of the compiled step / by hand's is 1.030, the goal at most 1.02",
        "met: the same products in the same dtypes as by hand, and no more casts that undo the cast before",
    ]


@pytest.mark.slow("a whole run of a benchmark")
def test_the_benchmark_of_steps_writes_times_memory_and_programs_of_every_variant(tmp_path, capsys):
    config = autocast.Config(
        models=("lstm",), rounds=2, block_ms=1, sequence=8, layers=1, vocabulary=32, run_dir=tmp_path
    )
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        autocast.main(config)
    result = json.loads((tmp_path / "autocast.json").read_text())
    (model,) = result["results"]
    assert model["model"] == "LSTM, 1 layer of 64, 2×8, 32 tokens"
    assert list(model["variants"]) == list(autocast.VARIANTS)
    assert all(len(row["milliseconds"]) == 2 and row["bytes"] > 0 for row in model["variants"].values())
    losses = [row["loss"] for row in model["variants"].values()]
    assert losses == pytest.approx([losses[0]] * 4, rel=0.05)  # all variants train in the same way
    markdown, printed = (tmp_path / "autocast.md").read_text(), capsys.readouterr().out
    for name in ("device", "versions", "date", "command"):
        assert f"- {name}: {result['environment'][name]}" in markdown
    for text in (*autocast.VARIANTS, "float32, lowered", "autocast, compiled", "the goal at most 1.01"):
        assert text in markdown and text in printed


@pytest.fixture
def measured_here(monkeypatch):
    """Measure models in this process; another takes seconds to import JAX."""

    def runs(commands):
        for name, command in commands.items():
            flags = dict(zip(command[3::2], command[4::2], strict=True))
            config = first_step.Config(layers=int(flags["--layers"]), target=flags["--target"])
            yield name, functools.partial(first_step.alone, flags["--alone"], config)

    monkeypatch.setattr(first_step.processes, "in_processes", runs)


def processor_seconds(row):
    return [sum(run["processor"].values()) for run in row["runs"]]


@pytest.mark.slow("a whole run of a benchmark")
def test_the_benchmark_of_the_first_step_compares_each_way_with_half_by_hand(measured_here, tmp_path):
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms
        first_step.main(first_step.Config(layers=1, rounds=1, run_dir=tmp_path))
    rows = {row["model"]: row for row in json.loads((tmp_path / "first_step.json").read_text())["models"]}
    assert list(rows) == [f"{api}, {way}" for api in first_step.APIS for way in first_step.WAYS]
    for name, row in rows.items():
        by_hand_row = rows[name.split(",")[0] + ", by hand"]
        totals, by_hand_totals = processor_seconds(row), processor_seconds(by_hand_row)
        ratios = [total / by_hand for total, by_hand in zip(totals, by_hand_totals, strict=True)]
        assert row["ratio"][1] == pytest.approx(np.median(ratios))
        assert all(run["wall"][stage] > 0 for run in row["runs"] for stage in first_step.STAGES)
    text = (tmp_path / "first_step.md").read_text()
    assert "NNX, autocast / by hand is" in text and "the goal at most 1.05" in text


@pytest.mark.slow("traces three models four times")
def test_the_models_of_the_first_step_have_the_same_products_in_half():
    products = {}
    for way in first_step.WAYS:
        with jax.numpy_dtype_promotion("standard"):  # Flax's norms
            step, args = first_step.train_step("NNX", way, 1, "mixed_bfloat16")
            assert {leaf.dtype.name for leaf in jax.tree.leaves(args[0])} == {"float32"}
            products[way] = programs.products(program_of(step, *args))
    assert products["apply_policy"] == products["autocast"] == products["by hand"]
    assert {product.split()[1] for product in products["by hand"]} == {"bf16×bf16"}


def test_a_bad_flag_ends_a_benchmark_with_one_line(capsys):
    for main, config, text in [
        (autocast.main, autocast.Config(rounds=-1), "--rounds must be at least 1, got -1"),
        (autocast.main, autocast.Config(width=65), "a width must be a multiple of 64, the width of a head, got 65"),
        (first_step.main, first_step.Config(layers=0), "--layers must be at least 1, got 0"),
        (first_step.main, first_step.Config(policy="float8"), "float8"),
        (numerics.main, numerics.Config(policy="float8"), "float8"),
        (loss_scaling.main, loss_scaling.Config(batch_size=-1), "--batch-size must be at least 0, got -1"),
        (gpu.main, gpu.Config(minutes=0.001), "--minutes must be at least 1, got 0.001"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(config)
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and text in said and said.count("\n") == 1


# The page.


@pytest.mark.slow("runs the code of the docs")
def test_the_code_of_the_page_runs_as_printed(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "autocast.md").read_text(), re.DOTALL)
    scope = {}
    for block in blocks:
        exec(compile(block, "docs/autocast.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert len(blocks) == 5 and printed.startswith("float32 float32\n")
    assert re.findall(r"^# (\[\(.*)", "".join(blocks), re.MULTILINE)[0] in printed  # the float8 products
    assert "dot_general" in printed  # the plan
    assert "8 × add: float32 there lowers the error" in printed and "no product leaves half" in printed
