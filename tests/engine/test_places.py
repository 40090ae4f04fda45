"""What is put into a program by the short way is what JAX binds, on every JAX: types, scopes, sources and effects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp._jaxpr import reading
from jaxmp._jaxpr.places import Places
from jaxmp._jaxpr.rebuild import bound
from jaxmp._jaxpr.walk import interpreted


def program(x, w, n):
    """One of each kind of equation: plain, weakly typed, staged by a rule of its own, with bodies, with effects."""
    with jax.named_scope("layer"):
        h = jax.nn.gelu(x @ w) * 2 + w[n] - jnp.arange(8.0).sum()
    h = jax.checkpoint(jnp.sin)(jax.nn.relu(h))
    h = jax.lax.fori_loop(0, 3, lambda i, h: h + w[i].astype(h.dtype), h)
    h = jax.lax.cond(n > 0, jnp.sort, lambda h: h[::-1], h)
    h = jax.lax.while_loop(lambda h: h.sum() < 3.0, lambda h: h + 1, h)
    jax.debug.callback(lambda h: None, h)
    ref = jax.new_ref(h)
    ref[...] += 1.0
    noise = jax.random.normal(jax.random.key(n), h.shape)
    return jax.jit(jnp.tanh)(ref[...]) + noise, h.astype(jnp.bfloat16), jax.lax.optimization_barrier((n, h)), n + 1


def described(jaxpr):
    """All that is said of each equation, and of those in it."""
    for eqn in reading.opened(jaxpr)[0].eqns:
        avals = [(atom.aval, getattr(atom.aval, "weak_type", None)) for atom in (*eqn.invars, *eqn.outvars)]
        effects = sorted(type(effect).__name__ for effect in eqn.effects)
        yield eqn.primitive.name, avals, str(eqn.source_info.name_stack), reading.source_of(eqn), effects
        for body in (reading.bodies_of(eqn) or reading.Bodies("", ())).jaxprs:
            yield from described(body)


@pytest.mark.parametrize("keeps", [True, False], ids=["as it stands", "of other parameters"])
def test_the_short_way_puts_what_bind_does(keeps):
    args = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.int32(2)
    jaxpr, consts = reading.opened(jax.make_jaxpr(program)(*args))

    def again(is_short):
        def evaluated(*args):
            with jax.named_scope("around"):
                places = Places()

            def equation(eqn, operands):
                places.at(eqn)
                if not is_short:
                    return places.within(bound, eqn, operands, eqn.params)
                return places.repeated(operands) if keeps else places.bound(operands, eqn.params)

            return interpreted(jaxpr, consts, args, equation)

        return jax.make_jaxpr(evaluated)(*args)

    short, long = again(True), again(False)
    assert str(short) == str(long)
    assert list(described(short)) == list(described(long))
    known = list(described(short))
    assert len(known) > 60 and known[0][2] == "around/layer"


@pytest.mark.parametrize("name", ["convert_element_type", "broadcast_in_dim"])
def test_what_jax_folds_or_drops_it_looks_at_again(name):
    x = jnp.float32(1.5)
    eqns = jax.make_jaxpr(lambda x: (x.astype("bfloat16"), jnp.broadcast_to(x, (2, 8))))(x).eqns
    (eqn,) = (eqn for eqn in eqns if eqn.primitive.name == name)
    own = {"new_dtype": x.dtype, "shape": (), "broadcast_dimensions": ()}
    same = eqn.replace(outvars=eqn.invars, params={key: own.get(key, value) for key, value in eqn.params.items()})

    def standing(is_short):
        def evaluated(x):
            places, results = Places(), []
            number = jax.lax.convert_element_type(np.float32(1.5), jnp.float32)  # written out in the program
            for each in (eqn, same):
                places.at(each)
                for operand in (x, number):
                    results += (
                        places.repeated([operand]) if is_short else places.within(bound, each, [operand], each.params)
                    )
            return results

        return jax.make_jaxpr(evaluated)(x)

    assert str(standing(True)) == str(standing(False))
    assert len(standing(True).eqns) == (2 if name == "broadcast_in_dim" else 1)
