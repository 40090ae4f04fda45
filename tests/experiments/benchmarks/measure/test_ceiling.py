"""The ceilings of a device, to which the utilisation of train steps is relative."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from experiments.benchmarks.measure import ceiling


def test_every_kind_of_product_has_its_dtype_and_two_matrices_drawn_apart():
    for name, (dtype, _) in ceiling.KINDS.items():
        product = ceiling.product(name, (64, 128, 256))()
        assert (product.shape, product.dtype) == ((64, 256), jnp.dtype(dtype)), name
        assert jnp.std(product.astype(jnp.float32)) == pytest.approx(128**0.5, rel=0.05), name


def test_there_is_a_ceiling_for_each_dtype_that_the_device_has_and_it_follows_from_the_times(monkeypatch):
    monkeypatch.setattr(ceiling, "SMOKE_SHAPES", ((8, 16, 8), (16, 8, 8)))
    monkeypatch.setattr(ceiling, "SMOKE_COPY_BYTES", 4096)
    result = ceiling.ceilings(smoke=True)
    assert set(result["best"]) == {*ceiling.KINDS} - {"tf32"}
    assert min(*result["best"].values(), result["copy"]) > 0
    assert f"fp32 {result['best']['fp32']:.3g}" in ceiling.sentence(result)

    monkeypatch.setattr(
        ceiling.timing, "interleaved", lambda turns, *_, **__: {name: [2.0, 4.0, 6.0] for name in turns}
    )
    monkeypatch.setattr(ceiling, "SMOKE_SHAPES", ((10, 20, 30), (5, 20, 30)))
    monkeypatch.setattr(ceiling, "SMOKE_COPY_BYTES", 4000)
    result = ceiling.ceilings(smoke=True)
    assert result["best"]["fp32"] == pytest.approx(2 * 10 * 20 * 30 / 4e-3 / 1e12)
    assert result["copy"] == pytest.approx(2 * 4000 / 4e-3 / 1e12)
