"""The names that the examples in docstrings use, and the Python on which they run."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def names_in_examples(doctest_namespace):
    """Add ``jaxmp``, ``jax`` and related libraries to the names of the examples."""
    import tempfile

    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import jaxmp

    doctest_namespace.update(jaxmp=jaxmp, jax=jax, jnp=jnp, nn=nn, nnx=nnx, optax=optax, tempfile=tempfile)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run the examples on the default Python only: tests cover the same functions on the newest one."""
    if isinstance(item, pytest.DoctestItem):
        item.add_marker("once")
