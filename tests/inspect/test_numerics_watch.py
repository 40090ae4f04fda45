"""Watching a run: its steps, their counts as scalars, and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp import cli
from jaxmp.inspect import Watch

# Optax's Adam needs promotion. test_program.py and test_numerics.py test the values and counts of a watched step.
pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]


def test_watch_keeps_every_nth_step():
    watch = Watch(lambda params, x: 2e-10 * jnp.sum(params * x), every=3)
    returned = [watch(step, jnp.float32(1), jnp.ones(4), loss_scale=2.0**step) for step in range(1, 8)]
    assert [step_numerics is not None for step_numerics in returned] == [False, False, True, False, False, True, False]
    assert {step: step_numerics.loss_scale for step, step_numerics in watch.steps.items()} == {3: 8.0, 6: 64.0}
    assert watch.shares("gradients") == {"": [1.0, 0.0]}


@pytest.mark.parametrize("every", [0, -1, 2.0, True, None])
def test_every_must_be_a_positive_int(every):
    with pytest.raises(ValueError, match=rf"every must be a positive int, got {every!r}; every=100 watches"):
        Watch(lambda params, x: jnp.sum(params * x), every=every)


GRADIENT = np.float32([0, 1e-12, -3e-9, 2.9e-8, 3e-8, 1e-3, -5, np.inf])


def test_scalars_are_the_shares_that_a_cast_counts():
    watch = Watch(lambda params, x: jnp.sum(params * x), every=2)
    assert watch.scalars() == {}
    for step in (1, 2, 3, 4):
        watch(step, jnp.ones(8), GRADIENT, loss_scale=2.0**step)
    for step, dtype in ((2, np.float16), (4, np.float16), (4, jnp.bfloat16)):
        scalars = watch.scalars(step, dtype=np.dtype(dtype).name)
        with np.errstate(over="ignore"):
            rounded = (GRADIENT * np.float32(2.0**step)).astype(dtype)
        vanished = np.mean((rounded == 0) & (GRADIENT != 0))
        assert scalars["gradients/vanished"] == vanished and (dtype != np.float16 or vanished > 0)
        assert scalars["gradients/zeros"] == 1 / 8 and scalars["not_finite"] >= 1
        assert all(type(number) is float for number in scalars.values())
    assert watch.scalars() == watch.scalars(4) != watch.scalars(2)
    assert watch.scalars(3) == watch.scalars(6) == {}


def test_scalars_of_a_train_step_have_the_paths_and_the_size_of_each_update():
    step = jaxmp.make_train_step(loss_fn, donate=False)
    state, batch = fresh_state(), {"x": jnp.array(INPUTS), "y": jnp.array(TARGETS)}
    watch = Watch(step, every=1)
    after, _ = watch(1, state, batch)
    scalars = watch.scalars(1)
    kinds = ("activations/vanished/one", "activation_gradients/zeros/two", "gradients/vanished/w", "updates/zeros/v")
    assert set(kinds) <= scalars.keys() and not any(name.startswith("weights") for name in scalars)
    for name in ("w", "v"):
        before, moved = np.asarray(state.params[name]), np.asarray(after.params[name])
        ratio = np.linalg.norm(moved - before) / np.linalg.norm(before)
        assert scalars[f"updates/ratio/{name}"] == pytest.approx(ratio, rel=1e-4)
    assert scalars["recommended_scale"] == watch.steps[1].recommended_scale("float16")


def loss_fn(params, model_state, batch, rng):
    """Return the loss of two layers in scopes, with noise on the inputs."""
    x = batch["x"] + 0.1 * jax.random.normal(rng, batch["x"].shape)
    with jax.named_scope("one"):
        y = jnp.tanh(x @ params["w"])
    with jax.named_scope("two"):
        z = y @ params["v"] * abs(params["phase"])
    return 1e-3 * jnp.mean((z - batch["y"]) ** 2), model_state, {"size": jnp.mean(abs(z))}


TX = jaxmp.loss_scaling(optax.adamw(1e-2), jaxmp.DynamicLossScale(2.0**8))
W, V, INPUTS, TARGETS = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)


def fresh_state():
    params = {"w": jnp.array(W), "v": jnp.array(V), "phase": jnp.array(INPUTS[0] + 1j * TARGETS[0])}
    return jaxmp.TrainState.create(params=params, tx=TX, rng=0)


def check_counts(step_numerics, before, after, metrics):
    assert (step_numerics.loss, step_numerics.loss_scale) == (float(metrics["loss"]), 2.0**8)
    assert list(step_numerics.activations) == list(step_numerics.activation_gradients) == ["one", "two"]
    assert step_numerics.activations["one"].count == step_numerics.activation_gradients["two"].count == 64
    assert step_numerics.gradients["w"].mean_abs > 0 and step_numerics.weights["w"].amax == abs(before["w"]).max()
    for name, update in step_numerics.updates.items():
        moved = np.asarray(after.params[name]) - before[name]
        parts = np.stack([moved.real, moved.imag]) if np.iscomplexobj(moved) else moved
        np.testing.assert_allclose((update.count, update.mean_abs), (parts.size, abs(parts).mean()), rtol=1e-4)
        np.testing.assert_allclose(update.ratio, np.linalg.norm(moved) / np.linalg.norm(before[name]), rtol=1e-4)


def test_a_watched_step_trains_as_the_plain_one_and_counts_what_it_computes():
    ends, batch = [], {"x": jnp.array(INPUTS), "y": jnp.array(TARGETS)}
    step = jaxmp.make_train_step(loss_fn, policy="mixed_float16", accumulate_steps=2, remat="dots")
    for every in (2, 100):
        state, watch = fresh_state(), Watch(step, every=every)
        for n in range(1, 4):
            before = jax.tree.map(np.array, state.params)
            state, metrics = watch(n, state, batch)
            if n == every:
                check_counts(watch.steps[n], before, state, metrics)
        ends.append((state.params, state.opt_state, metrics))
        assert list(watch.steps) == ([2] if every == 2 else [])
        assert set(metrics) == {"loss", "grad_norm", "loss_scale", "skipped", "size"}
    for watched_leaf, plain_leaf in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_array_equal(watched_leaf, plain_leaf)


def test_a_watched_step_of_nnx_changes_model_and_optimizer():
    ends, step, tx = [], jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2)), optax.sgd(0.1)
    for every in (1, 100):
        model = jaxmp.nnx.apply_policy(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), "mixed_bfloat16")
        optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param)
        watch = Watch(step, every=every)
        for n in (1, 2):
            metrics = watch(n, model, optimizer, jnp.ones((4, 4)))
        ends.append((model.kernel[...], metrics))
        assert [step_numerics.loss for step_numerics in watch.steps.values()][1:] == (
            [float(metrics["loss"])] if every == 1 else []
        )
    for watched_leaf, plain_leaf in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_array_equal(watched_leaf, plain_leaf)


def test_the_command_counts_a_function(tmp_path, monkeypatch, capsys):
    (tmp_path / "numerics_model.py").write_text(
        "import numpy as np\n"
        "def loss_fn(w, x):\n    return 1e-9 * (x @ w).sum()\n"
        "def args():\n    return np.ones((3, 2), np.float32), np.ones((4, 3), np.float32)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["numerics", "numerics_model:loss_fn", "--args", "numerics_model:args"]) == 0
    assert "gradients" in capsys.readouterr().out
    command = ["numerics", "numerics_model:loss_fn", "--args", "numerics_model:args", "--loss-scale"]
    assert cli.main([*command, "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gradients"][""]["amax"] == float(np.float32(4 * np.float32(1e-9)))
    assert cli.main([*command, "3"]) == 2
    assert "jaxmp numerics: error: loss_scale must be a power of two here" in capsys.readouterr().err
