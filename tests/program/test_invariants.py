"""Results that equal a program's arguments, and values that a loop computes once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmp.program.hoisting import hoist
from jaxmp.program.invariants import passed_on

A, B = jnp.ones((3, 2)), jnp.zeros((3, 2))


def turned(carry, xs, **options):
    """Return a scan whose first carry does not change, and whose second one does.

    The scan also returns each scanned element, and its double.
    """
    return lax.scan(lambda c, x: ((c[0], c[1] + x), (x, 2 * x)), (carry, carry), xs, **options)


KNOWN = [
        (lambda a, b: (b, a, a + b, 1.0), [1, 0, None, None]),
        (jax.checkpoint(lambda a, b: (jnp.sin(a), b, a)), [None, 1, 0]),
        (jax.checkpoint(jax.jit(lambda a, b: (b, b * a, a))), [1, None, 0]),
        (lambda a, b: turned(a[0], b), [None, None, 1, None]),
        (lambda a, b: turned(a, jnp.stack([b, b])), [0, None, None, None]),
        (lambda a, b: turned(a[0], b, reverse=True), [None, None, 1, None]),
        (lambda a, b: lax.scan(lambda c, x: (x, c), a[0], b), [None, None]),
        (lambda a, b: lax.scan(lambda c, _: ((c[1], c[0]), None), (a, b), length=2)[0], [None, None]),
        (lambda a, b: lax.cond(a[0, 0] > 0, lambda: (a, b, b), lambda: (a, a, 2 * b)), [0, None, None]),
        (lambda a, b: lax.scan(lambda c, x: lax.scan(lambda d, _: (d, x), c, length=2), a[0], b), [None, None]),
        (lambda a, b: lax.scan(lambda c, x: (c, lax.map(lambda y: y, x)), a[0], b), [None, 1]),
        (lambda a, b: lax.while_loop(lambda c: c[0].sum() < b.sum(), lambda c: (c[0] + a, c[1]), (a, b)), [None, 1]),
    ]  # fmt: skip


def test_passed_on_looks_through_calls_loops_and_branches():
    for number, (fun, ends) in enumerate(KNOWN):
        assert passed_on(jax.make_jaxpr(fun)(A, B)) == ends, number
        assert passed_on(jax.make_jaxpr(jax.jit(fun))(A, B)) == ends, number


def test_prints_stay_in_each_iteration(capfd):
    def fun(weight, x):
        jax.debug.print("sum {}", weight.sum())
        return checkpoint_name(jnp.sin(weight), "kept") * x

    @jax.jit
    def loop(weight, xs):
        turn = hoist(fun, weight, (xs[0],), jax.checkpoint_policies.save_only_these_names("kept"))
        return lax.map(lambda x: turn(weight, x), xs)

    result = loop(A, jnp.stack([A, B]))
    jax.effects_barrier()
    assert jnp.allclose(result, jnp.stack([jnp.sin(A), B])) and capfd.readouterr().out.count("sum 6.0") == 2
