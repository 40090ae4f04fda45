"""``autocast_dtype`` while autocast traces."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxmp


def test_autocast_dtype_is_the_half_dtype_except_in_float32_regions():
    dtypes = []

    def fun(x):
        dtypes.append(jaxmp.autocast_dtype())
        for level in ("half", "float32"):
            with jaxmp.precision(level):
                dtypes.append(jaxmp.autocast_dtype())
        return x

    jax.eval_shape(jaxmp.autocast(fun, "mixed_bfloat16"), jnp.ones(2))
    assert dtypes == [jnp.bfloat16, jnp.bfloat16, None]
