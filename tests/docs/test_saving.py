"""The code of docs/saving.md runs, and its statements about saving are true."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_tools import bits
from places import ROOT

import jaxmp

pytestmark = [
    pytest.mark.once,
    pytest.mark.slow("runs the code of the docs"),
    pytest.mark.filterwarnings("ignore:updates below"),  # of states with half params, before low_precision
]

pytest.importorskip("orbax.checkpoint")

TEXT = (ROOT / "docs" / "saving.md").read_text()


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all code of the page, and return its names."""
    scope: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.chdir(tmp_path_factory.mktemp("saving"))
        for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(block, scope)
    return scope


def test_a_state_comes_back_bit_for_bit_and_trains_on_as_it_would_have(scope):
    state, again = scope["state"], scope["again"]
    assert bits(again) == bits(state) and jnp.issubdtype(again.rng.dtype, jax.dtypes.prng_key)
    by_orbax = scope["from_dict"](
        scope["saved"], scope["text"], scope["fresh"]("mixed_float16", state.opt_state.loss_scale)[1]
    )
    assert bits(by_orbax) == bits(state)
    step, batch = jaxmp.make_train_step(scope["loss_fn"], ema_decay=0.9, donate=False), jnp.ones((2, 4))
    assert bits(step(again, batch)) == bits(step(state, batch))


def test_the_policy_comes_back_from_its_text(scope):
    assert scope["policy"] == jaxmp.get_policy("mixed_float16")
    by_path = jaxmp.PolicyMap("mixed_float16", {"**/BatchNorm_*": "float32"})
    assert jaxmp.get_policy(str(by_path)) == by_path
    expected = {"policy": str(scope["policy"]), "loss_scale": "DynamicLossScale", "text": {}}
    assert json.loads(scope["text"]) == expected


@dataclasses.dataclass(frozen=True)
class Named(jaxmp.LossScale):
    """A user's loss scale that contains text and a bool."""

    loss_scale: float
    name: str
    on: bool = True

    static_fields = ("name", "on")


@pytest.mark.parametrize(
    ("scale", "other", "by"),
    [
        (jaxmp.HeadroomLossScale(3, loss_scale=2.0**9, dtype="bfloat16"), jaxmp.HeadroomLossScale(), "msgpack"),
        (Named(2.0**9, "first"), Named(2.0, "second"), "orbax"),
    ],
)
def test_a_loss_scale_with_text_comes_back_through_both_formats(scope, scale, other, by, tmp_path):
    _, state = scope["fresh"]("mixed_float16", scale)
    saved, text = scope["to_dict"](jax.device_get(state)), scope["about"]("mixed_float16", state)
    if by == "msgpack":
        saved = flax.serialization.msgpack_restore(flax.serialization.msgpack_serialize(saved))
    else:
        with scope["ocp"].StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", saved)
        with scope["ocp"].StandardCheckpointer() as checkpointer:
            saved = checkpointer.restore(tmp_path / "state")
    new = scope["from_dict"](saved, text, scope["fresh"]("mixed_float16", other)[1])
    assert bits(new) == bits(state) and jax.tree.structure(new.opt_state.loss_scale) == jax.tree.structure(scale)


def test_files_of_before_with_the_text_among_the_numbers_are_read(scope):
    _, state = scope["fresh"]("mixed_float16", jaxmp.HeadroomLossScale(dtype="bfloat16"))
    saved = flax.serialization.to_state_dict(scope["without_key"](state))
    text = json.dumps({"policy": "mixed_float16", "loss_scale": "HeadroomLossScale"})
    new = scope["from_dict"](saved, text, scope["fresh"]("mixed_float16", jaxmp.HeadroomLossScale())[1])
    assert new.opt_state.loss_scale.dtype == "bfloat16"


def test_another_policy_and_scale_take_the_numbers_in_their_own_dtypes(scope):
    state, mixed, pure = scope["state"], scope["in_bfloat16"], scope["pure_bfloat16"]
    assert bits(mixed.params) == bits(state.params)
    for new, rounded in ((mixed, state.params), (pure, jaxmp.base.trees.cast(state.params, jnp.bfloat16))):
        assert isinstance(new.opt_state.loss_scale, jaxmp.NoOpLossScale) and bits(new.params) == bits(rounded)
        for name in ("ema_params", "step", "rng"):
            assert bits(getattr(new, name)) == bits(getattr(state, name))
        moments = new.opt_state.inner_state
        moments = moments.inner_state if new is pure else moments  # low_precision has a state around them
        assert bits(moments) == bits(state.opt_state.inner_state)
    step = jaxmp.make_train_step(lambda p, s, b, r: (jnp.mean(p["kernel"].astype(jnp.float32) ** 2), s), ema_decay=0.9)
    for new in (mixed, pure):
        dtype = new.params["kernel"].dtype
        trained, metrics = step(new, jnp.ones(()))
        assert not metrics["skipped"] and int(trained.step) == 2 and trained.params["kernel"].dtype == dtype


def test_half_params_become_those_of_any_policy_and_a_new_scale_starts_afresh(scope):
    _, saved = scope["fresh"]("bfloat16", jaxmp.NoOpLossScale())
    text = scope["about"]("bfloat16", saved)
    numbers = flax.serialization.msgpack_restore(
        flax.serialization.msgpack_serialize(jax.device_get(scope["to_dict"](saved)))
    )
    for policy in ("bfloat16", "float16", "float32"):
        _, fresh = scope["fresh"](policy, jaxmp.DynamicLossScale(2.0**9))
        new = scope["from_dict"](numbers, text, fresh)
        expected = jax.tree.map(lambda p, dtype=policy: p.astype(jnp.float32).astype(dtype), saved.params)
        assert bits(new.params) == bits(expected) and float(new.opt_state.loss_scale.loss_scale) == 2.0**9


def test_the_same_class_of_scale_goes_on_by_its_own_rule(scope):
    saved = scope["to_dict"](scope["state"])
    saved["opt_state"]["loss_scale"] |= {"loss_scale": jnp.float32(64.0), "counter": jnp.int32(7)}
    _, fresh = scope["fresh"]("mixed_float16", jaxmp.DynamicLossScale(period=3))
    scale = scope["from_dict"](saved, scope["text"], fresh).opt_state.loss_scale
    assert (float(scale.loss_scale), int(scale.counter), scale.period) == (64.0, 7, 2000)


def test_params_that_pass_the_largest_number_of_float16_are_refused(scope):
    saved = scope["to_dict"](scope["state"])
    saved["params"] = jax.tree.map(lambda leaf: leaf + 1e5, saved["params"])
    _, fresh = scope["fresh"]("float16", jaxmp.DynamicLossScale())
    with pytest.raises(
        ValueError, match="params must be finite in the new dtype, but some are larger than its maximum"
    ):
        scope["from_dict"](saved, scope["text"], fresh)


def test_typed_keys_and_other_loss_scales_behave_as_the_page_says(scope):
    with pytest.raises(TypeError, match="JAX array with PRNGKey dtype cannot be converted to a NumPy array"):
        flax.serialization.to_bytes(scope["state"])
    plain = scope["without_key"](scope["state"])
    other = scope["without_key"](scope["fresh"]("mixed_float16", jaxmp.NoOpLossScale())[1])
    with pytest.raises(ValueError, match="restore it into an object of the class that was saved"):
        flax.serialization.from_bytes(other, flax.serialization.to_bytes(plain))
    half = flax.serialization.from_bytes(
        {"w": np.zeros(2, np.float32)}, flax.serialization.to_bytes({"w": jnp.ones(2, jnp.bfloat16)})
    )
    assert half["w"].dtype == jnp.bfloat16  # neither format casts
