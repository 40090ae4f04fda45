"""error_budget measures what the roundings of each line cost, and finds the line that loses digits."""

from __future__ import annotations

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
from meshes import mesh_of

import jaxmp
from jaxmp.inspect import error_budget


def norm(arrays):
    return np.sqrt(sum(np.sum(np.abs(array) ** 2) for array in arrays))


def test_a_changed_choice_is_counted():
    loss_fn, make_args = PROGRAMS["experts"]
    budget = error_budget(loss_fn, "mixed_bfloat16")(*make_args())
    assert not budget.not_counted


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


PLANTS = (
    small_steps_in_a_scan_over_layers, product_of_a_small_difference,
    factors_near_one, large_offset, small_steps, moving_average, interpolation, steps_of_another_spelling,
    sum_of_a_list, updates_in_place,
)  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS)
def test_the_planted_line_comes_first(plant):
    lines, start = inspect.getsourcelines(plant)
    (planted,) = (start + number for number, line in enumerate(lines) if "# planted" in line)
    budget = error_budget(lambda w, x: jnp.mean(plant(w, x) ** 2), "mixed_bfloat16")(W, X)
    assert budget.by_line[0].name == f"test_budget.py:{planted}"


def test_the_advice_for_a_line_with_a_product_keeps_the_product_half():
    def loss_fn(w, x):
        x = as_rows(x)
        for _ in range(6):
            x = x + 0.004 * jnp.tanh(x @ w)
        return jnp.mean(x**2)

    advice = error_budget(loss_fn, "mixed_bfloat16")(W, X).sentences[-1]
    assert "add" in advice and "Write the products of this line on a line of their own, and put" in advice


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
    assert after.measured.gradient_error == pytest.approx(promised, rel=0.15)


def test_the_sentence_says_what_a_float32_region_around_the_line_gains():
    def budget(region):
        def loss_fn(w, x):
            average, new = x @ w + 5, jnp.tanh(x @ w) + 1
            for _ in range(8):
                with region():
                    average = 0.998 * average + 0.002 * new
                new = jnp.tanh(average @ w) + 1
            return jnp.mean((jnp.tanh(0.1 * average) - 1) ** 2)

        return error_budget(loss_fn, "mixed_bfloat16")(W, X)

    sentence = budget(contextlib.nullcontext).sentences[-1]
    assert "16 × mul" in sentence and "around the line" in sentence and "overrides" not in sentence
    promised = float(sentence.partition(" to ")[2].partition(" %")[0]) / 100
    after = budget(functools.partial(jaxmp.precision, "float32")).measured.gradient_error
    assert after == pytest.approx(promised, rel=0.05)


def test_an_error_near_the_floor_gets_no_advice():
    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    budget = error_budget(loss_fn, "mixed_bfloat16")(W, X)
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


def test_many_modules_are_measured_in_their_parents():
    def loss_fn(w, x):
        for number in range(12):
            with jax.named_scope(f"{'abcdefghijkl'[number]}/inner/product"):
                y = x @ w
            with jax.named_scope("other"):
                x = jnp.tanh(y)
        return jnp.mean(x**2)

    def nested(w, x):
        with jax.named_scope("stack"):
            return loss_fn(w, x)

    budget = error_budget(nested, "mixed_bfloat16")(W, X)
    assert [group.name for group in budget.by_path] == ["stack"]


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
    advice = error_budget(plain, "mixed_bfloat16")(W, X).sentences[-1]
    assert "h = h + step, 6 × add: float32 there" in advice
    if spelling == "override":
        assert 'override {"flow:add": "float32"}' in advice
        half = jaxmp.autocast(plain, "mixed_bfloat16", overrides={"flow:add": "float32"})
    else:
        assert 'Put `with jaxmp.precision("float32"):` around the line.' in advice
        region = functools.partial(jaxmp.precision, "float32")
        half = jaxmp.autocast(functools.partial(loss_fn, region), "mixed_bfloat16")
    exact, rounded = (compiled(jax.grad(fun))(W, X) for fun in (plain, half))
    promised = float(advice.partition(" to ")[2].partition(" %")[0]) / 100
    assert promised == pytest.approx(norm(rounded - exact) / norm(exact), rel=0.2)


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

    budget = error_budget(loss_fn, "mixed_bfloat16")(weights, x)
    (spread,) = budget.sentences
    assert spread.startswith("No line causes most of the gradients' error")
    promised = float(spread.partition("the error would be ")[2].partition(" %")[0]) / 100
    overrides = {"primitive:add": "float32", "primitive:tanh": "float32", "primitive:mul": "float32"}
    products_only = jaxmp.autocast(loss_fn, "mixed_bfloat16", overrides=overrides)
    exact, half = (jax.grad(fun)(weights, x) for fun in (loss_fn, products_only))
    assert promised < 0.8 * budget.measured.gradient_error
    assert promised == pytest.approx(norm(np.subtract(half, exact)) / norm(exact), rel=0.05)


# -- the same numbers in other spellings -----------------------------------------------------------------------------


def assert_same(budget, other):
    assert budget.measured.gradient_error == pytest.approx(other.measured.gradient_error, rel=0.2)
    assert budget.floor == pytest.approx(other.floor, rel=0.2)
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
        assert_same(whole, step_budget(accumulate_steps=2))

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


def test_a_result_has_modules_lines_and_sentences():
    budget = error_budget(PROGRAMS["messages"][0], "mixed_bfloat16")(*PROGRAMS["messages"][1]())
    for groups in (budget.by_path, budget.by_line):
        assert groups and all(0 <= group.share <= 1 for group in groups)
        assert all(group.error_alone > 0 for group in groups)
    assert any("dot_general" in group.operations for group in budget.by_line)
    assert json.loads(budget.to_json())["by_line"][0]["share"] == budget.by_line[0].share
    assert budget.sentences[-1] in str(budget)
    assert 0 < budget.floor < budget.measured.gradient_error
    for group in budget.by_line[:1]:
        assert group.error_in_float32 < budget.measured.gradient_error


def test_lines_of_a_program_with_many_lines_are_found():
    lines = [f"    h = jnp.tanh(h @ w + {number / 100})" for number in range(40)]
    lines[23] = "    h = (1 + 1e-3 * h) + -1; h = 1000 * h"  # loses digits
    names = {"jnp": jnp}
    exec("\n".join(["def loss_fn(w, h):", *lines, "    return jnp.mean(h**2)"]), names)
    budget = error_budget(names["loss_fn"], "mixed_bfloat16")(W, X)
    assert budget.by_line[0].name.endswith(":25") and budget.by_line[0].share > 0.5
    assert len(budget.by_line) < 20


def test_overflows_and_underflows_of_float16_come_first():
    def loss_fn(w, x):
        y = (1e-3 * x) @ (1e-5 * w)
        gram = (40 * x).T @ (40 * x)  # overflows
        return jnp.sum((gram / 1e5) @ w) + jnp.sum(y @ w)

    budget = error_budget(loss_fn, "mixed_float16")(W, 3 * X)
    line = inspect.getsourcelines(loss_fn)[1] + 2
    assert budget.by_line[0].overflows > 0 and budget.by_line[0].name == f"test_budget.py:{line}"
    assert any(group.underflows for group in budget.by_line)
    assert not np.isfinite(budget.measured.gradient_error)
    assert "overflow in one line" in budget.sentences[-1]


def test_a_function_without_a_loss_counts_underflows_too():
    budget = error_budget(lambda w, x: (1e-3 * x) @ (1e-5 * w), "mixed_float16")(W, X)
    assert sum(group.underflows for group in budget.by_line) > 0
    assert np.isnan(budget.loss) and np.isnan(budget.measured.loss_error)


def test_float32_is_advised_for_a_line_that_overflows():
    def loss_fn(w, x):
        large = (300 * x) @ (300 * w)  # overflows
        return jnp.sum((large / 1e5) @ w)

    budget = error_budget(loss_fn, "mixed_float16")(W, X)
    assert np.isinf(budget.measured.gradient_error)
    warning, advice = budget.sentences
    assert "is not finite under the policy" in warning and "first_nonfinite" in warning
    line = inspect.getsourcelines(loss_fn)[1] + 1
    assert f"overflow in one line: test_budget.py:{line}" in advice
    assert "float32 there lowers the error from infinite to" in advice
    assert 'jaxmp.precision("float32")' in advice


def test_a_while_loop_is_counted():
    def fun(x):
        _, y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ x)), (0, x @ x))
        return y @ x

    budget = error_budget(fun, "mixed_bfloat16")(X)
    assert not budget.not_counted
    assert budget.by_path[0].error_alone == pytest.approx(budget.measured.gradient_error, rel=0.1)


def test_roundings_inside_of_an_operation_are_not_counted():
    x = np.random.default_rng(0).uniform(size=(4096, 2)).astype("float32")
    budget = error_budget(lambda x: jnp.cumsum(x, 0), "mixed_bfloat16", overrides={"**": "half"})(x)
    (inside,) = budget.not_counted
    assert "unexplained error" in inside


def test_a_function_with_a_rule_for_vmap_is_not_counted_and_is_named():
    @jax.custom_batching.custom_vmap
    def double(y):
        return 2 * y

    double.def_vmap(lambda size, is_batched, y: (double(y), is_batched[0]))

    budget = error_budget(lambda x: double((x @ x).astype("bfloat16")).astype("float32") @ x, "mixed_bfloat16")(X)
    (gap,) = budget.not_counted
    assert gap.startswith("custom_vmap_call (") and gap.endswith("computes in its own dtypes")
    assert f"not counted: {gap}" in str(budget) and budget.measured.gradient_error > 0


def test_float8_products_are_refused(monkeypatch):
    monkeypatch.setenv("JAXMP_FLOAT8", "emulate")
    w = x = jnp.ones((2048, 2048))
    with pytest.raises(ValueError, match="float8 has no switches, but this program has"):
        error_budget(lambda w, x: jnp.mean(jnp.tanh(x @ w)), "mixed_float8")(w, x)


def test_errors_pass_through_functions_with_a_derivative_rule():
    @jax.custom_vjp
    def straight_through(x):
        return 3 * x

    straight_through.defvjp(lambda x: (3 * x, None), lambda _, ct: (0 * ct,))
    plain = error_budget(lambda x: 3 * (x @ x), "mixed_bfloat16")(X)
    with_rule = error_budget(lambda x: straight_through(x @ x), "mixed_bfloat16")(X)
    assert with_rule.measured.gradient_error == pytest.approx(plain.measured.gradient_error, rel=0.1)


def test_arguments_with_rounded_values_are_named():
    def loss_fn(w, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["old"].astype("float32")) ** 2)

    old = np.asarray(jnp.asarray(np.tanh(X), jnp.bfloat16))
    for values in (old, old.astype("float32")):
        budget = error_budget(loss_fn, "mixed_bfloat16")(W, {"x": X, "old": values})
        assert budget.half_arguments == ("batch/old",)
        assert "batch/old has values in half precision" in str(budget)
    for values in (X, np.sign(X), np.round(X), 0 * X):
        budget = error_budget(loss_fn, "mixed_bfloat16")(W, {"x": X, "old": values})
        assert budget.half_arguments == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: error_budget(jnp.sum, overrides={"a": "float32"}), "overrides need a policy"),
        (lambda: error_budget(lambda x: x @ x)(X), "rounds to half precision, but this one does not"),
        (lambda: error_budget(lambda x: (x @ x).astype(int), "mixed_bfloat16")(X), "floating results, got none"),
        (lambda: error_budget(lambda x: jnp.log(-abs(x @ x)), "mixed_bfloat16")(X), "float32 is not finite"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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
    assert {group.name for group in budget.by_path} >= {"hidden", "head"}
    (hidden,) = (group for group in budget.by_path if group.name == "hidden")
    assert "1 × dot_general" in hidden.operations and not budget.not_counted
    assert 0 < budget.measured.gradient_error < 0.05
