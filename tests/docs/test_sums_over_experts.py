"""The sums over experts in the table of docs/cookbook/recipes_of_others.md have its dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from places import ROOT

import jaxmp
from jaxmp.engine.plan import PlanRow

pytestmark = pytest.mark.once

PAGE = ROOT / "docs" / "cookbook" / "recipes_of_others.md"
TOKENS, WIDTH, EXPERTS, CHOSEN, CAPACITY = 64, 32, 8, 2, 24
SUMS = ("dot_general", "reduce_sum", "scatter-add", "add")


def expert(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.silu(x @ params["up"]) @ params["down"]


def outputs_of_all(params: Any, x: jax.Array) -> jax.Array:
    """Return the outputs of all experts for all tokens, of shape (tokens, experts, width)."""
    hidden = jax.nn.silu(jnp.einsum("td,edh->teh", x, params["up"]))
    return jnp.einsum("teh,ehd->ted", hidden, params["down"])


def outputs_by_expert(params: Any, x: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of the chosen experts, sorted by expert, and where they are in ``chosen``."""
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    hidden = jax.nn.silu(lax.ragged_dot(x[order // CHOSEN], params["up"], sizes))
    return lax.ragged_dot(hidden, params["down"], sizes), order


def all_weights(weights: jax.Array, chosen: jax.Array) -> jax.Array:
    """Return a weight for each expert, which is 0 if a token does not use the expert."""
    return (jax.nn.one_hot(chosen, EXPERTS) * weights[..., None]).sum(1)


def product(params: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    outputs = outputs_of_all(params, x)
    with jax.named_scope("combine"):
        return jnp.einsum("ted,te->td", outputs, all_weights(weights, chosen))


def weighted_sum(params: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    outputs = outputs_of_all(params, x)
    with jax.named_scope("combine"):
        return (outputs * all_weights(weights, chosen)[..., None]).sum(1)


def scatter(params: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    outputs, order = outputs_by_expert(params, x, chosen)
    with jax.named_scope("combine"):
        return jnp.zeros_like(x).at[order // CHOSEN].add(outputs * weights.reshape(-1)[order, None])


def segments(params: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    outputs, order = outputs_by_expert(params, x, chosen)
    with jax.named_scope("combine"):
        return jax.ops.segment_sum(outputs * weights.reshape(-1)[order, None], order // CHOSEN, TOKENS)


def scan(params: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    def add(total: jax.Array, of_expert: Any) -> Any:
        weights_of_expert, params_of_expert = of_expert
        output = expert(params_of_expert, x)
        with jax.named_scope("combine"):
            return total + weights_of_expert[:, None] * output, None

    weights = all_weights(weights, chosen)
    return lax.scan(add, jnp.zeros_like(x), (weights.T, {name: params[name] for name in ("up", "down")}))[0]


def capacity(params: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    is_chosen = jax.nn.one_hot(chosen, EXPERTS)
    rank = jnp.cumsum(is_chosen.reshape(-1, EXPERTS), 0).reshape(is_chosen.shape) - is_chosen
    slots = jax.nn.one_hot(rank.astype(jnp.int32), CAPACITY) * is_chosen[..., None]
    outputs = jnp.einsum("td,tec->ecd", x, slots.sum(1))
    outputs = jax.vmap(expert)({name: params[name] for name in ("up", "down")}, outputs)
    combine = (slots * weights[..., None, None]).sum(1)
    with jax.named_scope("combine"):
        return jnp.einsum("ecd,tec->td", outputs, combine)


def loop(params: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array, level: str | None = None) -> jax.Array:
    y, weights = jnp.zeros_like(x), all_weights(weights, chosen)
    for e in range(EXPERTS):
        output = expert({name: params[name][e] for name in ("up", "down")}, x)
        with jax.named_scope("combine"):
            if level is None:
                y = y + weights[:, e, None] * output
            else:
                with jaxmp.precision(level):
                    y = y + weights[:, e, None] * output
    return y


def in_float32(*args: Any) -> jax.Array:
    return loop(*args, level="float32")


PROGRAMS = {
    'jnp.einsum("ted,te->td", outputs, weights)': (product,),
    "(outputs * weights[..., None]).sum(1)": (weighted_sum,),
    "zeros.at[token].add(outputs)": (scatter, segments),
    "jax.lax.scan": (scan,),
    'jnp.einsum("ecd,tec->td", outputs, combine)': (capacity,),
    "y = y + weights[:, e, None] * expert(x)": (loop,),
}
"""The functions that combine the experts, by the code in the rows of the table."""


def decoder(combine: Callable[..., jax.Array], params: Any, x: jax.Array) -> jax.Array:
    """Return the loss of two blocks with attention and experts."""
    for _ in range(2):
        y = jax.nn.standardize(x)
        scores = jax.nn.softmax((y @ params["query"]) @ (y @ params["key"]).T)
        x = x + scores @ (y @ params["value"]) @ params["output"]
        y = jax.nn.standardize(x)
        weights, chosen = lax.top_k(jax.nn.softmax(y @ params["gate"]), CHOSEN)
        x = x + combine(params, y, weights, chosen)
    return -jax.nn.log_softmax(jax.nn.standardize(x) @ params["head"])[:, 0].mean()


def sum_of(combine: Callable[..., jax.Array]) -> PlanRow:
    """Return the last sum in the scope ``combine`` of a decoder's plan."""
    shapes = {name: (WIDTH, WIDTH) for name in ("query", "key", "value", "output", "head")}
    shapes |= {"gate": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, 64), "down": (EXPERTS, 64, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), "float32")
    plan = jaxmp.cast_plan(lambda params, x: decoder(combine, params, x), "mixed_bfloat16")(params, x)
    return [row for row in plan.rows if "combine" in row.path.split("/") and row.primitive in SUMS][-1]


def read_table() -> dict[str, tuple[str, str]]:
    """Return the dtype and the reason of each row of the table, by its code."""
    lines = PAGE.read_text().partition("| sum over experts | dtype |")[2].splitlines()[2:]
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        code, dtype, why = (cell.strip() for cell in line.strip("|").split("|"))
        rows[code.split("`")[1]] = dtype, why.split("`")[1]
    return rows


def test_each_sum_over_experts_has_the_dtype_and_the_reason_of_the_table() -> None:
    table = read_table()
    assert set(table) == set(PROGRAMS)
    for code, programs in PROGRAMS.items():
        dtype, why = table[code]
        for combine in programs:
            row = sum_of(combine)
            assert row.result == dtype and row.why.startswith(why), (combine.__name__, row)


def test_a_region_makes_the_sum_of_a_python_loop_float32() -> None:
    assert sum_of(in_float32).result == "float32"
