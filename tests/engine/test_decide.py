"""The rules that decide which values are half, each on a small program."""

from __future__ import annotations

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, both, compiled, cosine, dtypes_of, half, layer_norm, normal, operations, products
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from jaxmp.engine import decide as decide_module
from jaxmp.engine import neighbours
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.graph import build
from jaxmp.program.equations import opened
from jaxmp.program.walk import equations

X, W, B = normal(0, 4, 8), normal(1, 8, 8), normal(2, 8)


def test_products_take_half_operands_and_results_keep_their_dtype():
    for policy, dtype in HALVES.items():
        assert products(half(jnp.matmul, policy), X, W) == [dtype]
        assert jax.eval_shape(half(jnp.matmul, policy), X, W).dtype == jnp.float32


def test_operations_before_no_product_stay_float32():
    def fun(x, w, b):
        return jnp.tanh(x @ w + b)

    assert dtypes_of("add", half(fun), X, W, B) == ["float32"]
    assert dtypes_of("tanh", half(fun), X, W, B) == ["float32"]


def test_a_choice_between_a_half_value_and_a_float32_one_is_float32():
    """An example is the softplus of a scale in flowjax's autoregressive flow."""

    def fun(x, w):
        scale = jax.nn.softplus(x @ w)
        return (x * scale) @ w

    assert set(dtypes_of("select_n", half(fun), X, W)) == {"float32"}
    assert dtypes_of("mul", half(fun), X, W)[-1] == "float32"


COPIES = {
    "reshaped": (lambda total: total.reshape(1, 8), "bfloat16"),
    "broadcast": (lambda total: jnp.broadcast_to(total, (4, 8)), "float32"),
}


@pytest.mark.parametrize("move", COPIES)
def test_a_sum_that_a_product_reads_is_half_for_other_readers_unless_it_is_broadcast(move):
    copy, dtype = COPIES[move]

    def fun(x, w):
        total = jnp.sum(x @ w, 0)
        return copy(total) @ w, (total * 1.5) @ w

    assert dtypes_of("mul", half(fun), X, W) == [dtype]


def test_a_residual_stream_stays_half_and_its_norms_compute_in_float32():
    def fun(x, w):
        x = x @ w
        for _ in range(3):
            x = x + layer_norm(x) @ w
        return layer_norm(x) @ w

    streams = [dtype for name, dtype in operations(half(fun), X, W) if name == "add"]
    # The epsilon of a norm precedes each of the three sums. The epsilon of the last norm follows them.
    assert streams == ["float32", "bfloat16"] * 3 + ["float32"]
    assert set(dtypes_of("reduce_sum", half(fun), X, W)) == {"float32"}
    assert set(dtypes_of("sub", half(fun), X, W)) == {"float32"}


def test_a_stream_after_its_norm_is_half_as_in_a_post_norm_block():
    def fun(x, w):
        x = x @ w
        for _ in range(2):
            x = layer_norm(x + jax.nn.gelu(x @ w) @ w)
        return x @ w

    sums = [dtype for name, dtype in operations(half(fun), X, W) if name == "add"]
    assert sums.count("bfloat16") == 2 * 3  # two additions in each gelu, and the addition to the stream
    assert sums.count("float32") == 2  # the epsilons


def test_a_stream_of_batch_norms_and_activations_is_half():
    def norm(x):
        return (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5)

    def fun(x, w):
        x = jax.nn.relu(norm(x @ w))
        for _ in range(2):
            x = jax.nn.relu(x + norm(x @ w))
        return x @ w

    assert products(half(fun), X, W) == ["bfloat16"] * 4
    # Each operand of a product was rounded once.
    casts = [
        (eqn.invars[0].aval.dtype.name, eqn.params["new_dtype"].name)
        for eqn in jax.make_jaxpr(half(fun))(X, W).eqns
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.shape == X.shape
    ]
    assert casts.count(("float32", "bfloat16")) <= 1 + 2 * 3


@pytest.mark.parametrize("lowest", [-1e9, float(jnp.finfo(jnp.float32).min)])
def test_a_sum_of_scores_and_masked_scores_stays_finite(lowest):
    """Attention with relative positions is an example. The mask hides all keys from one query."""

    def attention(query, key, positions, value):
        mask = jnp.tril(jnp.ones((16, 16), bool)).at[2].set(False)
        scores = query @ key.T + jnp.where(mask, query @ positions.T, lowest)
        return jax.nn.softmax(scores) @ value

    args = [normal(seed, 16, 8) for seed in range(4)]
    for policy, dtype in HALVES.items():
        assert set(products(half(attention, policy), *args)) == {dtype}
        result, expected = both(attention, policy, *args)
        np.testing.assert_allclose(result, expected, atol=0.02)


def test_moves_of_data_between_half_products_are_half():
    def fun(x, w):
        h = (x @ w).reshape(2, 2, 8).transpose(1, 0, 2)[:, ::-1]
        return h.reshape(4, 8) @ w.T

    program = operations(half(fun), X, W)
    for name in ("reshape", "transpose", "rev"):
        assert {dtype for primitive, dtype in program if primitive == name} == {"bfloat16"}


def test_a_float32_value_with_a_name_is_saved_in_half_for_products():
    def fun(x, w):
        return checkpoint_name(jax.nn.softmax(x @ w), "probs") @ w

    assert dtypes_of("name", half(fun), X, W) == ["bfloat16"]


def test_weights_are_cast_at_each_use_and_activations_once():
    def fun(x, w):
        h = x @ w
        return h @ w + (h * 1.5) @ w, h

    program = jax.make_jaxpr(half(fun))(X, W)
    casts = [eqn for eqn in program.eqns if eqn.primitive.name == "convert_element_type"]
    weight = program.jaxpr.invars[1]
    assert sum(eqn.invars[0] is weight for eqn in casts) == 3


def test_a_cast_by_the_author_wins():
    def fun(x, w):
        h = (x @ w).astype(jnp.float16)
        return h, (h * 2).astype(jnp.float32) @ w

    result, _ = half(fun)(X, W)
    assert result.dtype == jnp.float16
    assert dtypes_of("mul", half(fun), X, W) == ["float16"]
    assert products(half(fun), X, W) == ["bfloat16", "bfloat16"]


def test_an_exponential_of_a_weight_that_its_author_rounds_reads_the_rounded_weight():
    def fun(x, w):
        return jnp.exp(w.astype(jnp.bfloat16)), x @ w

    exact = jnp.exp(W.astype(jnp.bfloat16).astype(jnp.float32))
    assert jnp.array_equal(half(fun)(X, W)[0], exact.astype(jnp.bfloat16))


def test_a_product_of_the_authors_half_operands_keeps_its_dtypes():
    def fun(x, w):
        x, w = x.astype(jnp.float16), w.astype(jnp.float16)
        return jnp.matmul(x, w, preferred_element_type=jnp.float32), x @ w

    def after_a_layer(x, w):
        x, w = jnp.tanh(x @ w).astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    assert dtypes_of("dot_general", half(fun), X, W) == ["float32", "float16"]
    assert dtypes_of("tanh", half(after_a_layer), X, W) == ["bfloat16"]  # a value between two products


def test_a_product_of_the_highest_precision_stays_float32():
    def fun(x, w):
        return jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST) @ w

    assert products(half(fun), X, W) == ["float32", "bfloat16"]


def test_half_arguments_meet_float32_weights_in_half_products():
    def fun(x, w):
        return x.astype(jnp.float32) @ w

    assert products(half(fun), X.astype(jnp.bfloat16), W) == ["bfloat16"]


def test_results_under_a_pure_policy_are_half():
    def fun(x, w, n):
        return x @ w, n

    result, n = half(fun, "bfloat16")(X, W, jnp.arange(3))
    assert (result.dtype, n.dtype) == (jnp.bfloat16, jnp.int32)


def test_an_outer_product_of_arguments_stays_float32():
    def fun(x, w, angles):
        return jnp.cos(jnp.einsum("i,j->ij", jnp.arange(4.0) * 1000, angles)) * (x @ w) @ w

    assert sorted(products(half(fun), X, W, B)) == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize("policy", HALVES)
def test_a_network_equals_one_with_casts_by_hand_bit_for_bit(policy):
    dtype = jnp.dtype(HALVES[policy])

    def network(x, w, b):
        h = jax.nn.relu(x @ w + b)
        h = h + jnp.tanh(layer_norm(h) @ w)
        return jnp.mean(jnp.square(h @ w))

    def by_hand(x, w, b):
        half_w = w.astype(dtype)
        h = jax.nn.relu(x.astype(dtype) @ half_w + b.astype(dtype))
        h = h + jnp.tanh(layer_norm(h.astype(jnp.float32)).astype(dtype) @ half_w)
        return jnp.mean(jnp.square((h @ half_w).astype(jnp.float32)))

    both = (half(network, policy), by_hand)
    ours, theirs = compiled(lambda *args: [jax.value_and_grad(fun, (0, 2))(*args) for fun in both])(X, W, B)
    assert jnp.array_equal(ours[0], theirs[0])
    for got, want in zip(ours[1], theirs[1], strict=True):
        # Autocast widens a value at each use, so its cotangents are rounded before they are summed.
        assert jnp.allclose(got, want, rtol=0.02, atol=2 * jnp.finfo(dtype).eps * float(jnp.max(jnp.abs(want))))


def test_gradients_of_rows_that_constants_pick_are_summed_in_float32():
    def fun(x, w):
        moved = w[jnp.clip(jnp.arange(8), 1, 6)]
        return jnp.sum(x @ moved @ moved)

    gradient = jax.make_jaxpr(jax.grad(half(fun), 1))(X, W)
    sums = [eqn.outvars[0].aval.dtype for eqn in equations(gradient) if eqn.primitive.name == "add_any"]
    assert sums == [jnp.float32]


def test_products_read_the_half_value_behind_the_authors_cast_to_float32():
    def fun(x, w):
        h = jax.nn.relu((x @ w).astype(jnp.bfloat16)).astype(jnp.float32)
        return h @ w, jnp.sum(h)

    casts = [eqn for eqn in equations(jax.make_jaxpr(half(fun))(X, W)) if eqn.primitive.name == "convert_element_type"]
    cast_values = {eqn.outvars[0] for eqn in casts}
    assert not [eqn for eqn in casts if eqn.invars[0] in cast_values and eqn.params["new_dtype"] == jnp.bfloat16]
    assert products(half(fun), X, W) == ["bfloat16"] * 2
    both = (lambda w: fun(X, w)[1] + fun(X, w)[0].sum(), lambda w: half(fun)(X, w)[1] + half(fun)(X, w)[0].sum())
    assert cosine(*compiled(lambda w: [jax.grad(run)(w) for run in both])(W)) > 0.999


DECIDED = {
    "an epsilon under a logarithm": (lambda h: jnp.log(1 - h**2 + 1e-6) @ W + h @ W, None),
    "an epsilon before an activation": (lambda h: jnp.cbrt(jnp.abs(h) + 1e-12) @ W, None),
    "a product of log-probabilities": (lambda h: jax.nn.log_softmax(h) @ W, None),
    "a product that an override makes half": (lambda h: jax.nn.log_softmax(h) @ W, {"primitive:dot_general": "half"}),
    "a solver in half": (
        lambda h: jax.lax.linalg.triangular_solve(h @ h.T, h, left_side=True) @ W,
        {"primitive:triangular_solve": "half"},
    ),
}


def test_the_texts_of_a_plan_affect_no_decision(monkeypatch):
    def dtypes(between, overrides):
        plan = jaxmp.cast_plan(lambda x: between(jnp.tanh(x @ W)), "mixed_float16", overrides)(X)
        return [(row.primitive, row.operands, row.result) for row in plan.rows]

    def reworded(method):
        def ask(*args):
            answer = method(*args)
            return answer and type(answer)(answer[0], "in other words", *answer[2:])

        return ask

    expected = {name: dtypes(*case) for name, case in DECIDED.items()}
    for name in ("kind_of", "request_of"):
        monkeypatch.setattr(Classifier, name, reworded(getattr(Classifier, name)))
    assert {name: dtypes(*case) for name, case in DECIDED.items()} == expected


FINE = X + 300.4  # the bfloat16 numbers nearby are 300 and 302

READERS = {
    "a result, moved": lambda y: y.T.reshape(-1),
    "an integer": lambda y: (10 * y.reshape(8, 4).T).astype(jnp.int32),
    "a cast": lambda y: y.astype(jnp.int32),
    "a comparison": lambda y: y > 300.2,
    "a place": lambda y: jnp.argsort(y, axis=None),
}


def test_a_value_that_a_product_reads_is_not_rounded_for_other_readers():
    def read_twice(read, x, w):
        y = x.T  # if only the product read `y`, autocast would cast before this transposition
        return y @ w, read(y)

    funs = {name: functools.partial(read_twice, read) for name, read in READERS.items()}
    results = compiled(lambda x, w: {name: (half(fun)(x, w)[1], fun(x, w)[1]) for name, fun in funs.items()})(FINE, X)
    for name, fun in funs.items():
        np.testing.assert_array_equal(*results[name], err_msg=name)
        rows = jaxmp.cast_plan(fun, "mixed_bfloat16")(FINE, X).rows
        assert next(row for row in rows if row.cls == "half").operands == ("bfloat16", "bfloat16"), name


def test_a_softmax_that_is_also_a_result_is_not_rounded():
    def fun(x, w):
        p = jax.nn.softmax(x @ w)
        return p @ w, p[0]

    expected = jax.nn.softmax((X.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)).astype(jnp.float32))[0]
    assert jnp.allclose(half(fun)(X, W)[1], expected, rtol=1e-5)


def test_a_comparison_with_zero_needs_no_float32_copy():
    def fun(x, w):
        y = x.T
        return y @ w, y > 0

    assert dtypes_of("transpose", half(fun), X, X) == ["bfloat16"]


@pytest.mark.parametrize("bound", [lambda w: jnp.exp(jnp.zeros(8)), lambda w: jnp.maximum(w, 0.5)])
def test_a_comparison_with_another_value_reads_float32(bound):
    def fun(x, w):
        y = x.T
        return y @ w, y > bound(w)

    assert dtypes_of("transpose", half(fun), W, W) == ["float32"]


def test_values_behind_a_barrier_are_half_if_they_were_half_before():
    def fun(x, w):
        first, second = jax.lax.optimization_barrier((x @ w, jnp.tanh(x @ w)))
        return first @ w, second @ w

    barrier = next(eqn for eqn in jax.make_jaxpr(half(fun))(X, W).eqns if eqn.primitive.name == "optimization_barrier")
    assert [result.aval.dtype for result in barrier.outvars] == [jnp.bfloat16] * 2


def test_in_float16_a_quotient_is_float32_unless_its_divisor_is_a_constant():
    def fun(x, w):
        return ((x @ w) / 4 @ w) / (1 + jnp.abs(x @ w)) @ w

    assert dtypes_of("div", half(fun, "mixed_float16"), X, W) == ["float16", "float32"]
    assert dtypes_of("div", half(fun, "mixed_bfloat16"), X, W) == ["bfloat16", "bfloat16"]


# -- the order of the rules -------------------------------------------------------------------------------------------


def block(x, w):
    for _ in range(2):
        scores = layer_norm(x) @ w @ w.T
        x = x + jax.nn.softmax(scores) @ w
        x = x + jax.nn.gelu(x @ w) @ w
    return jnp.mean((x @ w - 1) ** 2)


def recurrent(x, w):
    def turn(state, now):
        hidden, total = state
        hidden = jnp.tanh(hidden @ w + now)
        return (hidden, total + hidden.sum()), hidden

    (_, total), all_hidden = jax.lax.scan(turn, (x, 0.0), jnp.stack([x] * 3))
    return jnp.floor(all_hidden @ w) + total


def distances(x, w):
    codes = jnp.sum(w**2, 1)
    far = jnp.sum((x @ w) ** 2, 1, keepdims=True) - 2 * (x @ w) @ w.T + codes
    nearest = w[jnp.argmin(far, 1)]
    return (x @ w + jax.lax.stop_gradient(nearest - x @ w)) @ w


def searched_and_amplified(x, w):
    def turn(carry):
        residual = carry[0] @ w - jnp.sin(x @ w)
        return carry[0] - 0.1 * residual, jnp.abs(residual).max()

    return jax.nn.relu(x @ w) @ w, jax.lax.while_loop(lambda carry: carry[1] > 1e-3, turn, (x, 1.0))[0]


def masked_or_computed(x, w):
    masked = jnp.full_like(x, jnp.finfo(jnp.float32).min)
    return jax.lax.cond(x.sum() > 0, lambda: masked, lambda: x @ w) @ w


def updated_twice(x, w):
    updated = jnp.where(x > 0, x + x @ w, x)
    return jnp.tanh(0.5 * updated + updated @ w) @ w


def amplified_beside_a_distance(x, w):
    point = x[0]
    outer = jax.lax.dot_general(point, w[0], (((), ()), ((), ())))
    return jnp.sin(x @ w), jnp.sum(point**2) - 2 * outer


CLASSIFIER = Classifier(jnp.dtype(jnp.bfloat16))
ORDERED = [
    jax.grad(block),
    recurrent,
    distances,
    searched_and_amplified,
    masked_or_computed,
    updated_twice,
    amplified_beside_a_distance,
]


def decided(program):
    """Return the decisions without the rules, which depend on the order."""
    graph = build(opened(program), [X, W], [None] * len(program.out_avals), CLASSIFIER)
    decision_of = decide_module.decide(graph)
    return [decision_of[node]._replace(rule=None, cause=None) for node in graph.nodes]


@pytest.mark.parametrize("fun", ORDERED)
def test_shuffled_rules_decide_the_same(fun, monkeypatch):
    """The order of the rules does not matter, because a state only rises."""
    program = jax.make_jaxpr(fun)(X, W)
    expected = decided(program)
    settle = neighbours.Neighbours.settle
    raisers = decide_module.RAISERS
    for seed, order in enumerate(itertools.permutations(raisers)):

        def settled_in_another_order(neighbours, nodes, seed=seed):
            shuffled = list(nodes)
            random.Random(seed).shuffle(shuffled)
            settle(neighbours, shuffled)

        monkeypatch.setattr(neighbours.Neighbours, "settle", settled_in_another_order)
        monkeypatch.setattr(decide_module, "RAISERS", order)
        assert decided(program) == expected
