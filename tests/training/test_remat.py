"""``remat="layers"``: the backward pass recomputes one layer at a time."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from linen_zoo import data, numbers, zeros

import jaxmp
from jaxmp import TrainState, make_train_step
from jaxmp.program.walk import equations
from jaxmp.training.remat import recompute_layers

ROWS = data(8, 16)


class Block(nn.Module):
    """A residual block with random numbers and batch statistics."""

    recomputes_norm: bool = False

    @nn.compact
    def __call__(self, x):
        norm = nn.remat(nn.BatchNorm) if self.recomputes_norm else nn.BatchNorm
        h = norm(use_running_average=False, name="norm")(x)
        h = nn.Dropout(0.5, deterministic=False)(jnp.tanh(nn.Dense(64, name="up")(h)))
        return x + nn.Dense(16, name="down")(h)


class Net(nn.Module):
    """A stack of blocks in Python, or in a scan, with or without ``nn.remat``."""

    stack: str = "python"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="stem")(x)
        if self.stack == "scan":
            axes = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True, "dropout": True}}
            scanned = nn.scan(lambda block, x, _: (block(x), None), length=3, **axes)
            return scanned(Block(name="blocks"), x, None)[0]
        block = nn.remat(Block) if self.stack == "remat" else Block
        for n in range(2):
            x = block(self.stack == "remat norm", name=f"block_{n}")(x)
        return x


@functools.cache
def linen_step(stack: str, remat: str | None, **options):
    """Return a train step of a Linen model, and its first state.

    XLA keeps every rounding to half precision, so that programs that are fused in other ways have equal numbers.
    """
    model = jaxmp.linen.apply_policy(Net(stack), "mixed_bfloat16")
    variables = jax.eval_shape(model.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, ROWS)

    def loss_fn(params, model_state, batch, rng):
        variables = {"params": params, **model_state}
        out, model_state = model.apply(variables, batch, rngs={"dropout": rng}, mutable=["batch_stats"])
        return (out**2).mean(), model_state

    state = TrainState.create(
        params=numbers(variables["params"]),
        model_state={"batch_stats": zeros(variables["batch_stats"])},
        tx=optax.sgd(0.1),
        rng=jax.random.key(2),
    )
    every_rounding = {"xla_allow_excess_precision": False}
    return make_train_step(loss_fn, remat=remat, donate=False, compiler_options=every_rounding, **options), state


def stored_shapes(step, state) -> list[tuple[int, ...]]:
    """Return the shapes of the activations that the forward pass stores for the backward pass."""

    def loss(params):
        return step.update.loss_fn(params, state.model_state, ROWS, jax.random.key(0))

    residuals = jax.eval_shape(lambda params: jax.vjp(loss, params, has_aux=True)[1], state.params)
    return [leaf.shape for leaf in jax.tree.leaves(residuals) if leaf.shape[:1] == ROWS.shape[:1]]


@pytest.mark.once
@pytest.mark.parametrize(
    ("stack", "options"),
    [
        ("python", {}),
        pytest.param("scan", {"accumulate_steps": 2}, marks=pytest.mark.slow("compiles two long steps")),
    ],
)
def test_recomputed_layers_train_as_stored_ones_with_dropout_and_batch_statistics(stack, options):
    states = []
    for remat in (None, "layers"):
        step, state = linen_step(stack, remat, **options)
        for _ in range(2):
            state, _ = step(state, ROWS)
        states.append((state.params, state.model_state))
    for stored, recomputed in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(stored, recomputed, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stack", ["python", "remat norm"])
def test_only_the_inputs_of_layers_are_stored(stack):
    wide = (8, 64)
    step, state = linen_step(stack, None)
    assert stored_shapes(step, state).count(wide) >= 2
    step, state = linen_step(stack, "layers")
    assert wide not in stored_shapes(step, state)


@pytest.mark.once
def test_a_layer_that_the_author_recomputes_stays_as_it_is():
    def tanhs(stack, remat):
        step, state = linen_step(stack, remat)
        return str(jax.make_jaxpr(step.update)(state, ROWS)).count(" tanh ")

    assert tanhs("remat", "layers") == tanhs("remat", None) == tanhs("python", "layers") > tanhs("python", None)


def test_the_layers_of_an_nnx_model_are_recomputed():
    class Blocks(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = jnp.tanh(jnp.sin(block(x)))
            return x

    losses, programs = [], []
    for remat in (None, "layers"):
        model = jaxmp.nnx.apply_policy(Blocks(nnx.Rngs(0)), "mixed_bfloat16")
        optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
        step = jaxmp.nnx.make_train_step(lambda model, x: (model(x) ** 2).mean(), remat=remat)
        programs.append(step.lower(model, optimizer, ROWS).as_text())
        losses.append([float(step(model, optimizer, ROWS)["loss"]) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert [program.count("optimization_barrier") for program in programs] == [0, 3]


def layer(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w)


def stack(names, x, w):
    for name in names:
        with jax.named_scope(name):
            x = layer(x, w)
    return x


def towers(x, w):
    for tower in ("stage_0", "stage_1"):
        with jax.named_scope(tower):
            x = stack(["block_0", "block_1"], x, w)
    return x


def towers_of_scans(x, w):
    for tower in ("encoder_0", "encoder_1"):
        with jax.named_scope(tower):
            x, _ = jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=2)
    return x


def checkpoint_in_jit(x, w):
    part = jax.jit(jax.checkpoint(layer))
    for name in ("layer0", "layer1"):
        with jax.named_scope(name):
            x = part(x, w) @ w
    return x


def between_layers(x, w):
    return jnp.exp(stack(["layer1"], jnp.exp(stack(["layer0"], x, w)), w))


FUNCTIONS = {
    "a stack": (lambda x, w: stack(["layer0", "layer1"], x, w), 2),
    "a stack in a jit": (jax.jit(lambda x, w: stack(["layer0", "layer1"], x, w)), 2),
    "equations between layers": (between_layers, 2),
    "blocks in stages": (towers, 4),
    "scans in towers": (towers_of_scans, 2),
    "a checkpoint in a jit": (checkpoint_in_jit, 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_layer_is_recomputed_once_and_the_gradient_stays(name):
    function, count = FUNCTIONS[name]
    x, w = data(4, 4), 0.3 * data(4, 4, seed=1)

    def loss(w, transform=lambda fun: fun):
        return transform(function)(x, w).sum()

    recomputing = functools.partial(loss, transform=recompute_layers)
    np.testing.assert_allclose(jax.jit(jax.grad(recomputing))(w), jax.jit(jax.grad(loss))(w), rtol=1e-4, atol=1e-5)
    program = jax.make_jaxpr(recomputing)(w)
    assert sum(eqn.primitive.name == "remat2" for eqn in equations(program)) == count
    residuals = jax.tree.leaves(jax.vjp(recomputing, w)[1])
    assert len(residuals) < len(jax.tree.leaves(jax.vjp(loss, w)[1])) or name == "a checkpoint in a jit"


def test_recomputed_layers_are_differentiated_forward_and_mapped():
    fun, _ = FUNCTIONS["a stack"]
    x, w = data(4, 4), data(4, 4, seed=1)
    ours, theirs = (jax.jvp(f, (x, w), (x, w))[1] for f in (recompute_layers(fun), fun))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    mapped = jax.vmap(recompute_layers(fun), (0, None))(x[None], w)
    np.testing.assert_allclose(mapped[0], fun(x, w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("remat", "words"), [("layers", "none with a product"), ("full", "unknown remat.* 'layers'")])
def test_a_remat_that_would_free_no_memory_is_an_error(remat, words):
    state = TrainState.create(params=jnp.ones(()), tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match=words):
        make_train_step(lambda params, batch: params * jax.lax.map(jnp.sin, batch).mean(), remat=remat)(
            state, jnp.ones(3)
        )
