"""The blame of planted non-finite values."""

import functools
import inspect
import itertools
import re
from pathlib import Path

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_tools import replace_element

import jaxmp
from jaxmp.inspect import first_nonfinite

pytestmark = pytest.mark.once

FILE = Path(__file__).name
X = concrete.array([1.0, 2.0, 100.0])


def replace_first(value):
    """Return ``X`` with another first element."""
    return concrete.array([value, 2.0, 100.0])


def line_of(fun, marker="BAD"):
    """Return the source line of a function that has the marker."""
    numbered = enumerate(Path(__file__).read_text().splitlines(), 1)
    first = inspect.unwrap(fun).__code__.co_firstlineno
    return next(n for n, text in numbered if n >= first and marker in text)


def check(blame, primitive, kind, phase="forward", path="", turn=None, scaled_only=False, source=None):
    assert blame is not None
    fields = (blame.primitive, blame.kind, blame.phase, blame.path, blame.turn, blame.scaled_only)
    assert fields == (primitive, kind, phase, path, turn, scaled_only)
    if source is not None:
        assert blame.source.endswith(f"{FILE}:{source}")
    return blame


def test_an_overflow_is_blamed_where_it_first_is():
    def loss(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.exp(x).sum()  # BAD

    blame = check(first_nonfinite(loss)(X), "exp", "overflow", path="outer/inner", source=line_of(loss))
    (operand,) = blame.operands
    assert (operand.dtype, operand.shape, operand.low, operand.high) == ("float32", (3,), 1.0, 100.0)
    assert first_nonfinite(loss)(X / 10) is None

    def subtracted(x):
        a = jnp.exp(x)  # BAD
        return (a - jnp.exp(2 * x)).sum()

    check(first_nonfinite(subtracted)(X), "exp", "overflow", source=line_of(subtracted))
    # The forward pass is blamed, not the recomputation by remat.
    check(first_nonfinite(jax.checkpoint(lambda x: jnp.exp(x).sum()))(X), "exp", "overflow")


def test_a_layer_overflows_in_float16_by_policy():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for n in range(3):
                x = nn.Dense(8, name=f"layer{n}")(x)
            return x

    model, x = Model(), concrete.ones((2, 8))
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 20, np.float32), jax.eval_shape(model.init, jax.random.key(0), x)
    )
    half = jaxmp.linen.apply_policy(model, "mixed_float16")

    def loss(params, x):
        return half.apply(params, x).astype(jnp.float32).sum()

    blame = first_nonfinite(loss)(params, x)  # 180, 28_820, 4_611_220
    check(blame, "dot_general", "overflow", path="Model/layer2")


def test_the_operands_of_an_operation_tell_how_it_fails_in_the_forward_pass():
    for fun, x, primitive, kind in (
        (lambda x: (1 / x).sum(), [0.0, 1.0], "div", "division by zero"),
        (lambda x: (x / x).sum(), [0.0, 1.0], "div", "invalid"),
        (lambda x: (1e30 / x).sum(), [1e-20, 1.0], "div", "overflow"),
        (lambda x: jnp.log(x).sum(), [0.0, 1.0], "log", "division by zero"),
        (lambda x: jnp.log(x).sum(), [-1.0, 1.0], "log", "invalid"),
        (lambda x: jnp.log1p(x).sum(), [-1.0, 1.0], "log1p", "division by zero"),
        (lambda x: jax.lax.rsqrt(x).sum(), [0.0, 1.0], "rsqrt", "division by zero"),
        (lambda x: jnp.sqrt(x).sum(), [-1.0, 1.0], "sqrt", "invalid"),
        (lambda x: (x**-2).sum(), [0.0, 1.0], "integer_pow", "division by zero"),
        (lambda x: (x**20).sum(), [1e3, 1.0], "integer_pow", "overflow"),
        (lambda x: (x**0.5).sum(), [-1.0, 1.0], "pow", "invalid"),
        (lambda x: (x @ jnp.array([1e30, -1e30])).sum(), [1e30, 1e30], "dot_general", "overflow"),
        (
            lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32).sum(),
            [1e3, 1.0],
            "convert_element_type",
            "overflow",
        ),
        (lambda x: jnp.square(x.astype(jnp.float16)).astype(jnp.float32).sum(), [1e3, 1.0], "square", "overflow"),
        (lambda x: jnp.sum(x * 3.35e38), [0.5, 1.0], "reduce_sum", "overflow"),
    ):
        check(first_nonfinite(fun)(concrete.array(x)), primitive, kind)


def test_an_operation_that_fails_only_in_the_derivative_is_blamed():
    for fun, values, primitive, kind in (
        (lambda x: jnp.sqrt(x).sum(), [0.0, 1.0], "div", "division by zero"),
        (lambda x: jnp.linalg.norm(x), [0.0, 0.0], "div", "division by zero"),
        (lambda x: (x**0.5).sum(), [0.0, 1.0], "pow", "division by zero"),
        (lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum(), [0.0, 1.0], "div", "invalid"),
        (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum(), [0.0, 1.0], "div", "division by zero"),
    ):
        x = np.float32(values)
        value, gradient = jax.jit(jax.value_and_grad(fun))(x)
        assert np.isfinite(value) and not np.all(np.isfinite(gradient))
        check(first_nonfinite(fun)(x), primitive, kind, phase="backward")
        assert first_nonfinite(fun, grad=False)(x) is None


def test_an_overflow_that_a_where_hides_is_blamed_for_the_gradient_that_it_spoils():
    def loss(x):
        return jnp.where(x < 50, jnp.exp(x), 0.0).sum()

    check(first_nonfinite(loss)(X), "exp", "overflow")
    assert first_nonfinite(loss, grad=False)(X) is None


def test_an_infinity_that_is_masked_everywhere_is_none():
    def loss(x):
        hidden = jax.lax.stop_gradient(jnp.where(x < 50, jnp.exp(x), 0.0))
        return jnp.log(hidden[:2]).sum() + jnp.minimum(x / 0, 1).sum() + 1 / jnp.exp(x).sum()

    assert first_nonfinite(loss, grad=False)(X) is None
    later = first_nonfinite(lambda x: loss(x) + jnp.sqrt(-x).sum(), grad=False)(X)
    check(later, "sqrt", "invalid")


def test_masks_of_infinity_are_meant():
    mask = concrete.array([True, False, True])

    def attention(x):
        return jax.nn.softmax(jnp.where(mask, x, -jnp.inf))[0] + jax.nn.softmax(x + jnp.log(mask.astype(x.dtype)))[2]

    assert first_nonfinite(attention)(X) is None
    assert first_nonfinite(lambda x: (attention(x), jnp.where(mask, x, -jnp.inf)))(X) is None
    # If everything is masked, the operation that turns the mask into NaN is blamed.
    blame = first_nonfinite(lambda x: jax.nn.softmax(jnp.where(mask & False, x, -jnp.inf))[0])(X)
    check(blame, "sub", "invalid")
    # If an overflow follows a mask, the overflow is blamed.
    blame = first_nonfinite(lambda x: jnp.exp(jnp.where(mask, x, -jnp.inf)).sum())(X)
    check(blame, "exp", "overflow")
    blame = first_nonfinite(lambda x, mask: jnp.exp(x + mask).sum())(X, concrete.array([0.0, -jnp.inf, 0.0]))
    check(blame, "exp", "overflow")


def test_values_that_a_selection_leaves_out_are_not_blamed():
    def fun(x):
        hidden = jnp.exp(x)  # overflows in the last element
        return jnp.where(x < 50, jnp.where(x < 1.5, hidden, jnp.sqrt(-x)), 0.0) + jnp.where(x < 50, hidden, 1.0)

    check(first_nonfinite(fun, grad=False)(X), "sqrt", "invalid")


def chain(x):
    for _ in range(6):
        x = x * x / (jnp.abs(x) + 1)
    return x


def test_an_infinite_argument_is_blamed_unless_finite_numbers_overflow_somewhere_behind_it():
    x = replace_first(-np.inf)
    check(first_nonfinite(lambda x: chain(jnp.sin(x)).sum() + chain(x).sum())(x), "", "input", "input", path="x")
    blame = first_nonfinite(lambda x: jnp.exp(jnp.cumsum(x[1:]) + jnp.abs(x)[0] * 0 + chain(x)[1:]).sum())(X)
    check(blame, "exp", "overflow")
    behind = first_nonfinite(lambda x: (chain(x) + jnp.exp(x - 1 + chain(x))).sum())
    check(behind(x), "exp", "overflow")


def test_bad_data_and_bad_weights_are_blamed_by_their_path():
    def loss(params, batch):
        return jnp.mean((batch["x"] @ params["layer"]["kernel"] - batch["y"]) ** 2)

    params, batch = {"layer": {"kernel": concrete.ones(3)}}, {"x": concrete.ones((2, 3)), "y": concrete.zeros(2)}
    find = first_nonfinite(loss)
    assert find(params, batch) is None
    for bad in jnp.nan, jnp.inf:
        blame = check(find(params, replace_element(batch, 0, bad)), "", "input", "input", path="batch/x")
        assert str(blame).startswith("First non-finite value: the input 'batch/x'")
    blame = find({"layer": {"kernel": replace_first(np.nan)}}, batch)
    check(blame, "", "input", "input", path="params/layer/kernel")
    assert blame.operands[0].nans == 1 and "float32[3] in [2, 100] and 1 NaN" in str(blame)
    assert "float32[3] of NaN" in str(find({"layer": {"kernel": concrete.full(3, np.nan)}}, batch))
    # A non-finite input is blamed before an overflow.
    find_in_sum = first_nonfinite(lambda x, y: jnp.exp(x).sum() + y.sum())
    check(find_in_sum(X, replace_first(np.nan)), "", "input", "input", path="y")


def test_a_constant_is_blamed_where_nothing_else_explains_the_loss():
    scales = concrete.array([1.0, jnp.inf, 1.0])
    blame = check(first_nonfinite(lambda x: (x * scales).sum())(X), "mul", "input", "input")
    assert blame.summary().startswith("a constant in mul (")
    assert first_nonfinite(lambda x: x * scales, grad=False)(X) is None


def test_an_overflow_by_the_loss_scale_alone_is_named_as_such():
    def loss(x):
        return (x.astype(jnp.float16) * 300).astype(jnp.float32).sum()  # BAD

    blame = first_nonfinite(loss, loss_scale=2.0**15)(X)
    check(blame, "mul", "overflow", phase="backward", scaled_only=True, source=line_of(loss))
    assert "by the loss scale alone" in blame.summary()
    assert first_nonfinite(loss)(X) is None and first_nonfinite(loss, loss_scale=64.0)(X) is None
    blame = first_nonfinite(lambda x: x.sum() * 1e36, loss_scale=2.0**15)(X)
    check(blame, "mul", "overflow", path="loss_scale", scaled_only=True)
    check(first_nonfinite(lambda x: jnp.exp(x).sum(), loss_scale=8.0)(X), "exp", "overflow")


def test_the_turn_of_a_scan_is_the_index_into_the_scanned_arrays():
    factors = concrete.array([1e10, 1.0, 1e20, 1e20, 1.0, 1.0])

    def loss(x, reverse=False):
        return jax.lax.scan(lambda carry, factor: (carry * factor, carry), x.sum(), factors, reverse=reverse)[0]

    blame = check(first_nonfinite(loss)(X), "mul", "overflow", turn=3)
    assert blame.operands[1].high == np.float32(1e20)
    check(first_nonfinite(functools.partial(loss, reverse=True))(X), "mul", "overflow", turn=2)

    def roots(x, reverse=False):
        return jax.lax.scan(lambda carry, value: (carry + jnp.sqrt(value), None), 0.0, x, reverse=reverse)[0]

    x = concrete.array([4.0, 1.0, 0.0, 9.0])
    for function in (roots, functools.partial(roots, reverse=True)):
        check(first_nonfinite(function)(x), "div", "division by zero", "backward", turn=2)


def test_the_turn_of_a_while_loop_is_found():
    def fun(x):
        return jax.lax.while_loop(lambda c: c[0] < 6, lambda c: (c[0] + 1, c[1] * c[1]), (0, x))[1]

    blame = check(first_nonfinite(fun, grad=False)(X), "mul", "overflow", turn=4)
    assert blame.operands[0].high == np.float32(1e32)


def test_a_program_that_is_not_finite_only_if_it_is_compiled_is_told_apart():
    calls = itertools.count()

    def fun(x):
        shape = jax.ShapeDtypeStruct((), "float32")
        return jax.pure_callback(lambda x: np.float32(np.inf if next(calls) else x), shape, x)

    blame = first_nonfinite(fun, grad=False)(jnp.float32(1))
    assert (blame.phase, blame.kind, blame.primitive) == ("compiled", "compiled", "")
    assert "operation by operation, all results are finite" in str(blame)


def test_the_branch_that_was_taken_is_blamed():
    def loss(x):
        return jax.lax.cond(x[0] > 0, lambda x: jnp.log(-x).sum(), lambda x: (x / 0).sum(), x)

    check(first_nonfinite(loss)(X), "log", "invalid")
    check(first_nonfinite(loss)(-X), "div", "division by zero")


def test_the_backward_rule_of_a_custom_vjp_is_blamed():
    @jax.custom_vjp
    def total(x):
        return x.sum()

    total.defvjp(lambda x: (x.sum(), x), lambda x, ct: (ct / (x - 1),))
    check(first_nonfinite(lambda x: 2 * total(x))(X), "div", "division by zero", phase="backward")


def _state(loss_scale, weight=1.0):
    tx = jaxmp.loss_scaling(optax.sgd(0.0), loss_scale)
    return jaxmp.TrainState.create(params={"w": concrete.full(3, weight)}, tx=tx)


def _loss(params, model_state, batch, rng):
    return jnp.mean(jnp.exp(batch["x"] @ params["w"])), model_state  # BAD


def test_the_error_of_a_train_step_has_what_first_nonfinite_needs():
    step = jaxmp.make_train_step(_loss, max_consecutive_skips=2, accumulate_steps=2)
    state, batch = _state(jaxmp.StaticLossScale(8.0)), {"x": concrete.full((2, 3), 100.0)}
    advice = re.escape("jaxmp.inspect.first_nonfinite(step) with the arguments of the step")
    with pytest.raises(jaxmp.NonFiniteTrainingError, match=advice) as raised:
        for _ in range(9):
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
    blame = first_nonfinite(step)(state, raised.value.batch)
    check(blame, "exp", "overflow", turn=0, source=line_of(_loss))


def test_a_train_step_alone_is_enough_to_find_its_overflow():
    step = jaxmp.make_train_step(_loss)
    blame = first_nonfinite(step)(_state(jaxmp.StaticLossScale(2.0**10)), {"x": concrete.full((2, 3), 28.0)})
    check(blame, "mul", "overflow", phase="backward", scaled_only=True)
    assert first_nonfinite(step)(_state(jaxmp.StaticLossScale(2.0)), {"x": concrete.ones((2, 3))}) is None


def test_a_function_without_a_loss_and_a_scale_that_is_none_are_refused():
    with pytest.raises(TypeError, match=r"a loss must be a floating scalar, got float32 of shape \(3,\).*: grad=False"):
        first_nonfinite(lambda x: x)(X)
    with pytest.raises(TypeError, match="or check only the results: grad=False"):
        first_nonfinite(lambda x: {"loss": x.sum()})(X)
    for scale in (0, -2.0, np.inf, np.nan):
        with pytest.raises(
            ValueError, match=r"loss_scale must be a positive finite number, got .*; 1\.0 means no scaling"
        ):
            first_nonfinite(lambda x: jnp.sum(x), loss_scale=scale)
