"""error_budget predicts the effect of each rounding, and finds the line that loses digits."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import compiled
from budget_programs import PROGRAMS, language_model, language_model_args
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from meshes import mesh_of

import jaxmp
from jaxmp.inspect import error_budget
from jaxmp.inspect._budget import rounding
from jaxmp.inspect._budget.gradient_program import program_of_function
from jaxmp.inspect._budget.run import BudgetRun, results_of
from jaxmp.inspect._budget.sites import sites_of
from jaxmp.inspect._budget.tapped_evaluation import Changes, evaluate_wide
from jaxmp.program.reading import read_program

WITH_CHOICES = ("convolutions", "experts")
"""Programs in which rounding changes a choice: the sign of a ReLU's argument, or the experts of a token."""
IN_LOOPS = ("language model", "recurrent")
"""Programs in which a rounding in one iteration changes the rounding errors of the next."""


QUICK = ("distances",)
"""The programs that quick tests measure."""


def norm(arrays):
    return np.sqrt(sum(np.sum(np.abs(array) ** 2) for array in arrays))


def differences(results, others):
    return [a - b for a, b in zip(results[1:], others[1:], strict=True)]


class Truth:
    """The predicted and the true effects of each rounding alone."""

    def __init__(self, loss_fn, args, policy, probes):
        program = program_of_function(loss_fn, args, policy, None)
        self.sites = sites_of(read_program(program.jaxpr, program.consts))
        run = BudgetRun(program, self.sites, probes, 0)
        self.float32, alone = run.alone()
        changes = np.sqrt(np.mean(alone.changes**2, axis=0))
        self.gradients, self.losses = [], []
        for number in np.flatnonzero(changes > 0.01 * changes.max()):
            results = run.results([number])
            self.gradients.append((changes[number], norm(differences(results, self.float32))))
            self.losses.append((alone.loss_changes[number], results[0] - self.float32[0]))
        self.half = results_of(program)
        together = run.together(range(len(self.sites)), differences(self.half, self.float32))
        self.predicted = together.loss_changes.sum(), together.parts.sum()


@functools.cache
def truth(name, policy="mixed_bfloat16", loss_scale=1):
    loss_fn, make_args = PROGRAMS[name]
    return Truth(lambda *args: loss_scale * loss_fn(*args), make_args(), policy, probes=32)


def share_within(pairs, factor):
    """Return the share of predictions within a factor, of those above 1 % of the largest."""
    largest = max(abs(predicted) for predicted, _ in pairs)
    pairs = [(predicted, true) for predicted, true in pairs if abs(predicted) > 0.01 * largest]
    ratios = np.array([predicted / true if true else np.inf for predicted, true in pairs])
    return np.mean((ratios < factor) & (ratios > 1 / factor))


def programs(without=(), quick=QUICK):
    slow = pytest.mark.slow("differentiates the gradient of a deep program")
    names = [name for name in PROGRAMS if name not in without]
    return [pytest.param(name, marks=() if name in quick else slow) for name in names]


class TestAgainstTheTruth:
    """The true effect of a rounding is that of a run in which it is the only one."""

    @pytest.mark.parametrize("name", programs(without=["convolutions"]))
    def test_nine_in_ten_effects_on_the_gradients_are_as_predicted(self, name):
        assert share_within(truth(name).gradients, 1.6) >= 0.9

    @pytest.mark.parametrize("name", programs(without=[*IN_LOOPS, "convolutions"]))
    def test_nine_in_ten_effects_on_the_loss_are_as_predicted(self, name):
        assert share_within(truth(name).losses, 1.05) >= 0.9

    @pytest.mark.parametrize("name", programs(quick=["distances"]))
    def test_float16_with_a_loss_scale_is_as_predicted_too(self, name):
        assert share_within(truth(name, "mixed_float16", loss_scale=1024).gradients, 1.6) >= 0.9

    @pytest.mark.parametrize("name", programs(without=WITH_CHOICES))
    def test_all_roundings_together_explain_the_error(self, name):
        measured = truth(name)
        loss, gradients = measured.predicted
        error = norm(differences(measured.half, measured.float32))
        assert gradients == pytest.approx(error, rel=0.1)
        assert loss == pytest.approx(measured.half[0] - measured.float32[0], abs=1e-3 * measured.half[0])


def test_a_changed_choice_is_said_to_be_no_small_error():
    loss_fn, make_args = PROGRAMS["experts"]
    budget = error_budget(loss_fn, "mixed_bfloat16")(*make_args())
    assert budget.measured.gradient_error > 2 * budget.predicted.gradient_error
    assert any("a choice changes" in sentence for sentence in budget.sentences)


# -- planted lines ---------------------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32) / 4


def as_rows(x):
    """Return ``x`` as rows of a table: a stream that begins with them is half, and with an argument it is float32."""
    return x[np.arange(len(x))]


def small_steps(w, x):
    x = as_rows(x)
    for _ in range(8):
        x = x + 0.01 * jnp.tanh(x @ w)  # planted
    return x @ w


def small_steps_in_a_scan_over_layers(w, x):
    def layer(h, w):
        step = jnp.tanh(h @ w)
        return h + 0.02 * step, None  # planted

    return jax.lax.scan(layer, x, jnp.stack([w] * 16))[0] @ w


def moving_average(w, x):
    average = x @ w
    for number in range(16):
        average = 0.99 * average + 0.01 * jnp.tanh(average @ w * number)  # planted
    return average @ w


def factors_near_one(w, x):
    h = x @ w
    for _ in range(16):
        h = h * 1.003  # planted
    return h @ w


def interpolation(w, x):
    h, goal = x @ w, jnp.tanh(x @ w.T)
    for _ in range(16):
        h = h + 0.004 * (goal + -h)  # planted
    return h @ w


def steps_of_another_spelling(w, x):
    x = as_rows(x)
    for _ in range(8):
        step = 0.01 * jnp.tanh(x @ w)
        x = jnp.add(x, step)  # planted
    return x @ w


def sum_of_a_list(w, x):
    y = 1 + jnp.tanh(x @ w)
    total = functools.reduce(jnp.add, [y * 1.0] * 64)  # planted
    return total @ w


def large_offset(w, x):
    y = x @ w
    shifted = y + 100  # planted
    return (shifted + -100) @ w


def product_of_a_small_difference(w, x):
    y = 20 + x @ w  # planted
    return (y + -20) @ w


def updates_in_place(w, x):
    y = x @ w
    for _ in range(16):
        y = y.at[:8].set(y[:8] + 0.01 * jnp.tanh(y[:8]))  # planted
    return y @ w


QUICK_PLANTS = (product_of_a_small_difference,)
OTHER_PLANTS = (
    small_steps_in_a_scan_over_layers,
    factors_near_one, large_offset, small_steps, moving_average, interpolation, steps_of_another_spelling,
    sum_of_a_list, updates_in_place,
)  # fmt: skip
other_plants = [pytest.param(plant, marks=pytest.mark.slow("differentiates a gradient")) for plant in OTHER_PLANTS]


@pytest.mark.parametrize("plant", [*QUICK_PLANTS, *other_plants])
def test_the_planted_line_comes_first(plant):
    lines, start = inspect.getsourcelines(plant)
    (planted,) = (start + number for number, line in enumerate(lines) if "# planted" in line)
    budget = error_budget(lambda w, x: jnp.mean(plant(w, x) ** 2), "mixed_bfloat16")(W, X)
    assert budget.by_line[0].name == f"test_budget.py:{planted}"
    assert budget.rows[0].source == f"test_budget.py:{planted}"


@pytest.mark.slow("differentiates a gradient")
def test_the_advice_for_a_line_with_a_product_keeps_the_product_half():
    def loss_fn(w, x):
        x = as_rows(x)
        for _ in range(6):
            x = x + 0.004 * jnp.tanh(x @ w)
        return jnp.mean(x**2)

    advice = error_budget(loss_fn, "mixed_bfloat16", probes=1)(W, X).sentences[-1]
    assert "add" in advice and "Write the products of this line on a line of their own, and put" in advice


@pytest.mark.slow("two long unrolled programs")
def test_the_sentence_says_what_float32_gains_and_the_override_does_it():
    def loss_fn(w, x):
        with jax.named_scope("encoder"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("flow"):
            for _ in range(8):
                step = 0.01 * jnp.tanh(x @ w)
                x = x + step
        return jnp.mean((x @ w) ** 2)

    before = error_budget(loss_fn, "mixed_bfloat16")(W, X)
    sentence = before.sentences[-1]
    assert "x = x + step, 8 × add: float32 there lowers the error from" in sentence
    assert "no product leaves half" in sentence and "'flow:add'" in sentence.replace('"', "'")
    after = error_budget(loss_fn, "mixed_bfloat16", overrides={"flow:add": "float32"})(W, X)
    assert after.measured.gradient_error < 0.7 * before.measured.gradient_error
    promised = float(sentence.partition(" to ")[2].partition(" %")[0]) / 100
    assert after.measured.gradient_error == pytest.approx(promised, rel=0.05)


@pytest.mark.slow("two unrolled programs")
def test_the_sentence_says_what_a_float32_region_around_the_line_gains():
    def budget(region):
        def loss_fn(w, x):
            average, new = x @ w + 5, jnp.tanh(x @ w) + 1
            for _ in range(8):
                with region():
                    average = 0.998 * average + 0.002 * new
                new = jnp.tanh(average @ w) + 1
            return jnp.mean((jnp.tanh(0.1 * average) - 1) ** 2)

        return error_budget(loss_fn, "mixed_bfloat16", probes=1)(W, X)

    sentence = budget(contextlib.nullcontext).sentences[-1]
    assert "16 × mul" in sentence and "around the line" in sentence and "overrides" not in sentence
    promised = float(sentence.partition(" to ")[2].partition(" %")[0]) / 100
    after = budget(functools.partial(jaxmp.precision, "float32")).measured.gradient_error
    assert after == pytest.approx(promised, rel=0.05)


def test_an_error_near_the_floor_gets_no_advice():
    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    budget = error_budget(loss_fn, "mixed_bfloat16", probes=1)(W, X)
    assert budget.by_line[0].share > 0.9  # all operations are on one line
    (sentence,) = budget.sentences
    assert "is near the floor of" in sentence and "float32 elsewhere gains little" in sentence


def test_a_line_with_several_modules_has_a_group_for_each_of_them():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, name="second")(nn.tanh(nn.Dense(16, name="first")(x) + 300) - 1)

    model = Net()
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), X))
    budget = error_budget(lambda params, x: jnp.mean(model.apply(params, x) ** 2), "mixed_bfloat16")(params, X)
    line = inspect.getsourcelines(Net)[1] + 3
    names = {f"test_budget.py:{line} (Net/first)", f"test_budget.py:{line} (Net/second)"}
    assert names <= {group.name for group in budget.by_line}


@pytest.mark.parametrize("spelling", ["override", "region"])
def test_the_promised_error_is_that_of_a_run_under_the_advice(spelling):
    scope = functools.partial(jax.named_scope, "flow") if spelling == "override" else contextlib.nullcontext

    def loss_fn(region, w, x):
        h = jnp.tanh(x @ w)
        for _ in range(6):
            step = 0.01 * jnp.tanh(h @ w)
            with scope(), region():
                h = h + step
        return jnp.mean((h @ w - 1) ** 2)

    plain = functools.partial(loss_fn, contextlib.nullcontext)
    advice = error_budget(plain, "mixed_bfloat16", probes=1)(W, X).sentences[-1]
    assert "h = h + step, 6 × add: float32 there" in advice
    if spelling == "override":
        assert 'overrides={"flow:add": "float32"}' in advice
        half = jaxmp.autocast(plain, "mixed_bfloat16", overrides={"flow:add": "float32"})
    else:
        assert 'Put `with jaxmp.precision("float32"):` around the line.' in advice
        region = functools.partial(jaxmp.precision, "float32")
        half = jaxmp.autocast(functools.partial(loss_fn, region), "mixed_bfloat16")
    exact, rounded = (compiled(jax.grad(fun))(W, X) for fun in (plain, half))
    promised = float(advice.partition(" to ")[2].partition(" %")[0]) / 100
    assert promised == pytest.approx(norm(rounded - exact) / norm(exact), rel=0.2)


@pytest.mark.slow("differentiates two gradients")
def test_an_error_of_many_lines_is_compared_with_that_of_the_products():
    weights = [np.random.default_rng(seed).normal(size=(32, 32)).astype(np.float32) / 12 for seed in range(9)]
    x = np.random.default_rng(100).normal(size=(64, 32)).astype(np.float32)

    def loss_fn(w, x):
        start = x = as_rows(x)
        x = x + 0.1 * jnp.tanh(x @ w[0])
        x = x + 0.1 * jnp.tanh(x @ w[1])
        x = x + 0.1 * jnp.tanh(x @ w[2])
        x = x + 0.1 * jnp.tanh(x @ w[3])
        x = x + 0.1 * jnp.tanh(x @ w[4])
        x = x + 0.1 * jnp.tanh(x @ w[5])
        x = x + 0.1 * jnp.tanh(x @ w[6])
        x = x + 0.1 * jnp.tanh(x @ w[7])
        x = x + 0.1 * jnp.tanh(x @ w[8])
        return jnp.mean((x - start) ** 2)

    budget = error_budget(loss_fn, "mixed_bfloat16", probes=1)(weights, x)
    spread, floor = budget.sentences
    assert spread.startswith("No line causes most of the gradients' error")
    promised = float(floor.partition("the error would be ")[2].partition(" %")[0]) / 100
    overrides = {"primitive:add": "float32", "primitive:tanh": "float32", "primitive:mul": "float32"}
    products_only = jaxmp.autocast(loss_fn, "mixed_bfloat16", overrides=overrides)
    exact, half = (jax.grad(fun)(weights, x) for fun in (loss_fn, products_only))
    assert promised < 0.8 * budget.measured.gradient_error
    assert promised == pytest.approx(norm(np.subtract(half, exact)) / norm(exact), rel=0.05)


# -- the same numbers in other spellings -----------------------------------------------------------------------------


def loss_errors(budget):
    """Return the error of the loss by each operation of the forward pass that computes in half.

    Casts are left out, because the residual stream of a scan is half, and that of straight-line code is not.
    """
    errors = collections.Counter()
    for row in budget.rows:
        if row.phase == "forward" and "operand" not in row.operation and row.operation != "gather":
            errors[row.operation] += row.loss_error
    return {operation: error for operation, error in errors.items() if error}


def assert_same(budget, other):
    ours, theirs = loss_errors(budget), loss_errors(other)
    largest = max(map(abs, ours.values()))
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-3 * largest)
    assert budget.measured.gradient_error == pytest.approx(other.measured.gradient_error, rel=0.2)
    assert budget.loss == pytest.approx(other.loss)


@pytest.fixture(scope="module")
def in_scan():
    return error_budget(language_model, "mixed_bfloat16")(*language_model_args())


@pytest.fixture(scope="module")
def whole():
    return step_budget()


FORMS = {
    "under jit": jax.jit(language_model),
    "under remat": functools.partial(language_model, is_remat=True),
    "without a scan": functools.partial(language_model, is_scan=False),
}


@pytest.mark.slow("differentiates the gradient of a transformer twice")
@pytest.mark.parametrize("form", FORMS)
def test_another_form_of_a_program_has_the_same_numbers(in_scan, form):
    assert_same(in_scan, error_budget(FORMS[form], "mixed_bfloat16")(*language_model_args()))


@pytest.mark.slow("differentiates the gradient of three train steps")
class TestTrainSteps:
    """A step has the budget of its loss function, with any number of microbatches and devices."""

    def test_a_step_has_the_numbers_of_its_loss_function(self, whole):
        params, batch = PROGRAMS["flow"][1]()
        assert_same(whole, error_budget(PROGRAMS["flow"][0], "mixed_bfloat16")(params, batch))

    def test_microbatches_change_no_rounding_of_the_forward_pass(self, whole):
        accumulated = step_budget(accumulate_steps=2)
        assert_same(whole, accumulated)
        assert accumulated.predicted.gradient_error == pytest.approx(accumulated.measured.gradient_error, rel=0.1)

    def test_a_mesh_changes_no_rounding(self, whole):
        mesh = mesh_of()
        specs = jaxmp.sharding.fsdp_specs(PROGRAMS["flow"][1]()[0], mesh, min_size=1)
        sharded = step_budget(sharding=jaxmp.sharding.Sharding(mesh, specs))
        assert_same(whole, sharded)

    def test_the_policy_of_a_step_may_be_passed_to_the_tool(self, whole):
        assert_same(whole, step_budget(policy=None, policy_of_tool="mixed_bfloat16"))
        with pytest.raises(ValueError, match="already has a policy, got policy='mixed_bfloat16'; leave it out"):
            step_budget(policy_of_tool="mixed_bfloat16")


def step_budget(policy="mixed_bfloat16", policy_of_tool=None, **options):
    loss_fn, make_args = PROGRAMS["flow"]
    params, batch = make_args()
    sharding = options.get("sharding")
    if sharding is None:
        state = jaxmp.TrainState.create(params=params, tx=optax.sgd(0.1))
    else:
        state = jaxmp.TrainState.create_sharded(lambda: jax.tree.map(jnp.asarray, params), optax.sgd(0.1), sharding)
    step = jaxmp.make_train_step(loss_fn, policy=policy, donate=False, **options)
    return error_budget(step, policy_of_tool)(state, batch)


# -- what the result has ---------------------------------------------------------------------------------------------


def test_shares_of_rows_lines_and_modules_add_up_to_one():
    budget = error_budget(PROGRAMS["messages"][0], "mixed_bfloat16")(*PROGRAMS["messages"][1]())
    for groups in (budget.rows, budget.by_line, budget.by_path, budget.by_rule):
        assert sum(group.share for group in groups) == pytest.approx(1)
    assert {row.phase for row in budget.rows} == {"forward", "backward"}
    assert {group.name for group in budget.by_rule} == {"product", "between half operations"}
    assert {row.operation for row in budget.rows} >= {"dot_general", "operand of dot_general", "add", "scatter-add"}
    assert json.loads(budget.to_json())["rows"][0]["share"] == budget.rows[0].share
    assert budget.sentences[-1] in str(budget)
    assert budget.table().row_count == min(len(budget.rows), 20)


def test_a_value_that_is_half_already_is_not_rounded_again():
    def fun(x):
        y = (x @ x).astype("bfloat16").astype("float32").T
        return jnp.abs(y[:2]) @ x

    rows = error_budget(fun, "mixed_bfloat16")(X).rows
    assert sum(row.sites for row in rows) == 5  # x for each product that reads it, and the two results
    assert not any(row.operation in ("abs", "transpose", "slice") for row in rows)


def test_constants_are_rounded_too():
    rows = error_budget(lambda x: 0.1 * (x @ x) @ x, "mixed_bfloat16")(X).rows
    assert "operand of mul" in {row.operation for row in rows}
    rows = error_budget(lambda x: 0.5 * (x @ x) @ x, "mixed_bfloat16")(X).rows
    assert "operand of mul" not in {row.operation for row in rows}  # half has 0.5


def test_float32_results_count_as_if_they_were_half():
    def loss_fn(w, x):
        return jnp.mean(jax.nn.softmax(x @ w) ** 2)

    budget = error_budget(loss_fn, "mixed_bfloat16", float32=True)(W, X)
    saved = [row for row in budget.rows if row.is_float32]
    assert {"exp", "reduce_sum"} <= {row.operation for row in saved}
    assert "softmax" in {group.name for group in budget.by_rule}
    assert sum(row.share for row in budget.rows if not row.is_float32) == pytest.approx(1)


def test_the_sentence_names_a_line_that_rounds_if_float32_lines_have_rows():
    def loss_fn(w, x):
        y = x @ w  # the only line that rounds
        total = jnp.cumsum(jnp.tanh(100 * y.astype("float32")) + 1000)
        return jnp.mean((total / 1000 - jnp.arange(1.0, 1 + y.size)) ** 2)

    budget = error_budget(loss_fn, "mixed_bfloat16", float32=True)(W, X)
    lines = inspect.getsourcelines(loss_fn)[1]
    kept = f"test_budget.py:{lines + 2}"
    assert any(row.is_float32 and row.source == kept for row in budget.rows)
    assert budget.by_line[0].name == kept
    assert f"test_budget.py:{lines + 1}, y = x @ w" in budget.sentences[-1]


def test_a_program_in_float32_is_said_to_round_nothing():
    budget = error_budget(lambda x: jnp.tanh(x) @ x, float32=True)(X)
    assert budget.sentences == ("The program rounds nothing to half precision.",)
    assert all(row.is_float32 for row in budget.rows)


def test_overflows_and_underflows_of_float16_come_first():
    def loss_fn(w, x):
        y = (1e-3 * x) @ (1e-5 * w)
        gram = (40 * x).T @ (40 * x)  # overflows
        return jnp.sum((gram / 1e5) @ w) + jnp.sum(y @ w)

    budget = error_budget(loss_fn, "mixed_float16")(W, 3 * X)
    line = inspect.getsourcelines(loss_fn)[1] + 2
    assert budget.rows[0].overflows > 0 and budget.rows[0].source == f"test_budget.py:{line}"
    assert any(row.underflows for row in budget.rows)
    assert not np.isfinite(budget.measured.gradient_error)
    assert "overflow in one line" in budget.sentences[-1]


def test_a_function_without_a_loss_counts_underflows_too():
    budget = error_budget(lambda w, x: (1e-3 * x) @ (1e-5 * w), "mixed_float16")(W, X)
    assert sum(row.underflows for row in budget.rows) > 0
    assert np.isnan(budget.loss) and {row.loss_error for row in budget.rows} == {0}


def test_float32_is_advised_for_a_line_that_overflows():
    def loss_fn(w, x):
        large = (300 * x) @ (300 * w)  # overflows
        return jnp.sum((large / 1e5) @ w)

    budget = error_budget(loss_fn, "mixed_float16")(W, X)
    assert np.isnan(budget.measured.gradient_error)
    assert 0 < budget.predicted.gradient_error < 1
    warning, advice = budget.sentences
    assert "is not finite under the policy" in warning and "first_nonfinite" in warning
    line = inspect.getsourcelines(loss_fn)[1] + 1
    assert f"overflow in one line: test_budget.py:{line}" in advice
    assert "float32 there lowers the error from infinite to" in advice
    assert 'jaxmp.precision("float32")' in advice


def test_a_while_loop_is_not_counted_and_is_named():
    def fun(x):
        _, y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ x)), (0, x @ x))
        return y @ x

    budget = error_budget(fun, "mixed_bfloat16")(X)
    (gap,) = budget.not_counted
    assert gap.startswith("while (test_budget.py:") and "does not differentiate" in gap
    assert f"not counted: {gap}" in str(budget)
    assert "not counted may cause the rest" in budget.sentences[0]


def test_a_function_with_a_rule_for_vmap_is_not_counted_and_is_named():
    @jax.custom_batching.custom_vmap
    def double(y):
        return 2 * y

    double.def_vmap(lambda size, is_batched, y: (double(y), is_batched[0]))

    budget = error_budget(lambda x: double(x @ x) @ x, "mixed_bfloat16")(X)
    (gap,) = budget.not_counted
    assert gap.startswith("custom_vmap_call (") and "does not differentiate it backwards" in gap
    assert budget.measured.gradient_error > 0


def test_an_operation_whose_derivative_raises_is_not_counted_and_is_named():
    double = Primitive("double")
    double.def_abstract_eval(lambda y: y)
    mlir.register_lowering(double, mlir.lower_fun(lambda y: 2 * y, multiple_results=False))

    def refuse(primals, tangents):
        raise AssertionError

    ad.primitive_jvps[double] = refuse
    budget = error_budget(lambda x: double.bind(x @ x) @ x, "mixed_bfloat16")(X)
    (gap,) = budget.not_counted
    assert gap.startswith("double (") and gap.endswith(": its derivative raises AssertionError")
    assert budget.measured.gradient_error > budget.predicted.gradient_error > 0


def test_float8_products_are_refused(monkeypatch):
    monkeypatch.setenv("JAXMP_FLOAT8", "emulate")
    w = x = jnp.ones((2048, 2048))
    with pytest.raises(ValueError, match="does not cover float8, but this program has"):
        error_budget(lambda w, x: jnp.mean(jnp.tanh(x @ w)), "mixed_float8")(w, x)


def test_errors_pass_through_functions_with_a_derivative_rule():
    @jax.custom_vjp
    def straight_through(x):
        return 3 * x

    straight_through.defvjp(lambda x: (3 * x, None), lambda _, ct: (0 * ct,))
    plain = error_budget(lambda x: 3 * (x @ x), "mixed_bfloat16")(X)
    with_rule = error_budget(lambda x: straight_through(x @ x), "mixed_bfloat16")(X)
    assert with_rule.predicted.gradient_error == pytest.approx(plain.predicted.gradient_error, rel=0.1)


def test_arguments_with_rounded_values_are_named():
    def loss_fn(w, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["old"].astype("float32")) ** 2)

    old = np.asarray(jnp.asarray(np.tanh(X), jnp.bfloat16))
    for values in (old, old.astype("float32")):
        budget = error_budget(loss_fn, "mixed_bfloat16", probes=1)(W, {"x": X, "old": values})
        assert budget.half_arguments == ("batch/old",)
        assert "batch/old has values in half precision" in str(budget)
    for values in (X, np.sign(X), np.round(X), 0 * X):
        budget = error_budget(loss_fn, "mixed_bfloat16", probes=1)(W, {"x": X, "old": values})
        assert budget.half_arguments == ()


def kept_bytes(fun, *args):
    """Return the bytes of the arrays that the backward pass reads, without scalars."""
    _, pull_back = jax.vjp(fun, *args)
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(pull_back) if leaf.ndim}
    return sum(leaf.nbytes for leaf in arrays.values())


def test_a_tap_keeps_two_bytes_for_each_element():
    dtype, x = np.dtype(jnp.bfloat16), jnp.asarray(X)
    assert kept_bytes(lambda sink: rounding.tap(dtype, x, jnp.float32(0), sink), rounding.sink_of(dtype)) == 2 * X.size


def test_products_keep_no_rounded_copies_of_their_operands():
    x, w, v = (jnp.asarray(array, jnp.bfloat16) for array in (X, W, 2 * W))
    program = program_of_function(lambda x, w, v: (x @ w, x @ v), (x, w, v), None, None)

    def at_operand(key, eqn, number, dtype, value):
        return rounding.round_if(jnp.bool_(True), dtype, value) if eqn.primitive.name == "dot_general" else value

    def results(*inputs):
        changes = Changes({}, None, None, at_operand)
        return evaluate_wide(program.jaxpr, program.consts, inputs, changes, {})

    assert kept_bytes(results, x, w, v) == X.nbytes + 2 * W.nbytes  # in float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: error_budget(jnp.sum, "mixed_bfloat16", probes=0), "probes is the number of random directions"),
        (lambda: error_budget(jnp.sum, overrides={"a": "float32"}), "overrides need a policy"),
        (lambda: error_budget(lambda x: x @ x)(X), "rounds to half precision, but this one does not"),
        (lambda: error_budget(lambda x: (x @ x).astype(int), "mixed_bfloat16")(X), "floating results, got none"),
        (lambda: error_budget(lambda x: jnp.log(-abs(x @ x)), "mixed_bfloat16")(X), "float32 is not finite"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow("differentiates the gradient of a model")
@pytest.mark.usefixtures("standard_promotion")
def test_an_nnx_step_in_float16_has_paths_reasons_and_true_gradients():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.head = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.gelu(self.norm(self.hidden(x))))

    model = jaxmp.nnx.apply_policy(Net(nnx.Rngs(0)), "mixed_float16")
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=jaxmp.StaticLossScale(2.0**10))
    step = jaxmp.nnx.make_train_step(lambda model, batch: jnp.mean((model(batch["x"]) - 1) ** 2), donate=False)
    budget = error_budget(step)(model, optimizer, {"x": X[:, :8]})
    assert budget.predicted.gradient_error == pytest.approx(budget.measured.gradient_error, rel=0.1)
    assert {group.name for group in budget.by_path} >= {"hidden", "head"}
    products = [row for row in budget.rows if row.path == "hidden" and row.operation == "dot_general"]
    assert products and {row.why for row in products} == {"product"}
    assert {row.dtype for row in budget.rows} == {"float16"} and not budget.not_counted
