"""Linen models as users write them, and the same models with dtypes by hand."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from jaxmp.linen import apply_policy
from jaxmp.program.equations import primitive_of
from jaxmp.program.primitives import BROADCAST, PICKS, PRODUCTS
from jaxmp.program.walk import equations, jaxprs_in

HALVES = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


def written(model: nn.Module, policy: str) -> nn.Module:
    """Return a model whose code runs as it is written, in the compute dtype of a policy."""
    return apply_policy(model, policy, {"**": "written"})


# Linen's norms and cells add half and float32 arrays, even if every dtype is written by hand.
standard_promotion = functools.partial(jax.numpy_dtype_promotion, "standard")

# Compile quickly, without optimisation, and keep every rounding of the program.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
)


def data(*shape: int, seed: int = 7) -> jax.Array:
    """Return normal float32 numbers, most of them not exact in half precision.

    NumPy draws them, because JAX would compile for each shape.
    """
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape, np.float32))


def rngs(seed: int = 0) -> dict[str, jax.Array]:
    return dict(zip(("params", "dropout", "noise"), jax.random.split(jax.random.key(seed), 3), strict=True))


def products(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Return the operand dtypes of the products in the traced ``fun``, in order.

    Two different dtypes are joined: ``float16*float32``.
    """
    jaxpr = jax.make_jaxpr(functools.partial(fun, **kwargs))(*args)
    dtypes = [[v.aval.dtype.name for v in eqn.invars[:2]] for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS]
    return ["*".join(dict.fromkeys(names)) for names in dtypes]


def shapes(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the shapes and dtypes of the variables of ``model``."""
    return jax.eval_shape(functools.partial(model.init, **kwargs), rngs(), *args)


def model_products(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Return the operand dtypes of all products in a call of ``model``."""
    apply = functools.partial(model.apply, rngs=rngs(1), mutable=["batch_stats"])
    return products(apply, shapes(model, *args, **kwargs), *args, **kwargs)


def same_bits(got: Any, want: Any) -> None:
    """Assert that two trees have the same structure, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert jnp.result_type(a) == jnp.result_type(b), f"{name}: {jnp.result_type(a)} is not {jnp.result_type(b)}"
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


def zeros(shapes: Any) -> Any:
    """Return zeros in the shapes that ``jax.eval_shape`` returned."""
    return jax.tree.map(lambda leaf: concrete.zeros(leaf.shape, leaf.dtype), shapes)


def numbers(shapes: Any, seed: int = 7) -> Any:
    """Return small normal numbers in the shapes that ``jax.eval_shape`` returned.

    NumPy draws them, so that nothing is compiled.
    """
    normal = np.random.default_rng(seed).standard_normal
    return jax.tree.map(lambda leaf: concrete.array(normal(leaf.shape, np.float32) / 2, leaf.dtype), shapes)


def dtypes_of(tree: Any) -> set[str]:
    return {jnp.result_type(leaf).name for leaf in jax.tree.leaves(tree)}


def float32(tree: Any) -> Any:
    """Return ``tree`` with its floating arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def loss_of(model: nn.Module, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return a function of the variables that returns a loss and the outputs.

    The loss is the sum of squares of the outputs.
    """

    def loss(params: Any, other_variables: Any) -> tuple[jax.Array, Any]:
        out = float32(model.apply({"params": params, **other_variables}, *args, rngs=rngs(1), **kwargs))
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out) if leaf.dtype == jnp.float32), out

    return loss


def split(variables: Any) -> tuple[Any, Any]:
    return variables["params"], {name: value for name, value in variables.items() if name != "params"}


def is_as_by_hand(model: nn.Module, by_hand: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> None:
    """Assert that ``model`` computes the same as ``by_hand``, and has gradients."""
    losses = [loss_of(m, *args, **kwargs) for m in (model, by_hand)]
    same_computation(*losses, *split(variables))
    jax.eval_shape(jax.grad(losses[0], has_aux=True, allow_int=True), *split(variables))


def same_computation(fun: Callable[..., Any], other: Callable[..., Any], *args: Any) -> Any:
    """Assert that two functions have the same operations on the same values.

    This is stronger than equal bits. A cast to half may come before or after an operation that only moves, selects or
    repeats elements, and before or in the branches of a conditional.

    Returns:
      The shapes and dtypes of the results.
    """
    got, want = (jax.make_jaxpr(f, return_shape=True)(*args) for f in (fun, other))
    assert got[1] == want[1]
    assert computation(_without_dead_code(got[0])) == computation(_without_dead_code(want[0]))
    return got[1]


def _without_dead_code(closed: Any) -> Any:
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


_CALLS = ("pjit", "jit", "remat", "remat2", "checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call")


_HALVES = (np.dtype("float16"), np.dtype(jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class _Cast:
    """A value cast to half, where the cast comes after operations that move it."""

    dtype: str
    value: str


def computation(jaxpr: Any, inputs: Any = None) -> list[Any]:
    """Return a fingerprint of each output, as an expression of the inputs.

    Casts to the same dtype are left out.
    """
    known: dict[Any, Any] = dict(
        zip(_open(jaxpr).constvars, map(_fingerprint, getattr(jaxpr, "consts", ())), strict=True)
    )
    jaxpr = _open(jaxpr)
    known.update(zip(jaxpr.invars, range(len(jaxpr.invars)) if inputs is None else inputs, strict=True))

    def read(atom: Any) -> Any:
        return _fingerprint(atom.val) if hasattr(atom, "val") else known[atom]

    for eqn in jaxpr.eqns:
        operands, name = [read(atom) for atom in eqn.invars], primitive_of(eqn)
        if name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
            if old == new:
                results = operands
            elif new in _HALVES:
                results = [_Cast(new.name, operands[0])]
            else:
                results = [_digest(name, new.name, *operands)]
        elif name == "cast_repeated":
            old, new = eqn.invars[0].aval.shape, eqn.params["shape"]
            results = [_Cast(eqn.params["dtype"].name, _repeated(operands[0], old, new))]
        elif (
            name == "clamp" and eqn.outvars[0].aval.dtype == np.int32
        ):  # JAX clamps the index of a switch once or twice
            results = [operands[1]]
        elif name in _CALLS:
            results = computation(next(jaxprs_in(eqn)), operands)
        elif name == "cond":  # a cast may come before the branches or in them
            index, *read_in_branches = operands
            branches = [computation(branch, read_in_branches) for branch in eqn.params["branches"]]
            results = [_digest(name, index, *of_branches) for of_branches in zip(*branches, strict=True)]
        else:
            if name in BROADCAST:  # the primitive repeats operands implicitly
                shape = eqn.outvars[0].aval.shape
                operands = [
                    _repeated(value, atom.aval.shape, shape) for value, atom in zip(operands, eqn.invars, strict=True)
                ]
            params = {name: _param(value) for name, value in sorted(eqn.params.items()) if name != "weak_type"}
            moved = operands[0] if name in PICKS and operands and isinstance(operands[0], _Cast) else None
            digest = _digest(name, [moved.value, *operands[1:]] if moved else operands, params)
            results = [f"{digest}.{index}" for index in range(len(eqn.outvars))]
            results = [_Cast(moved.dtype, result) for result in results] if moved else results
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _repeated(value: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
    if old == new:
        return value
    if isinstance(value, _Cast):
        return _Cast(value.dtype, _repeated(value.value, old, new))
    axes = tuple(range(len(new) - len(old), len(new)))
    params = {"broadcast_dimensions": _param(axes), "shape": _param(new), "sharding": repr(None)}
    return _digest("broadcast_in_dim", [value], params) + ".0"


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _param(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_param(item) for item in value]
    return computation(value) if hasattr(_open(value), "eqns") else repr(value)


def _fingerprint(value: Any) -> str:
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return _digest(array.dtype.name, array.shape, array.tobytes())


def _digest(*parts: Any) -> str:
    return hashlib.sha1(repr(parts).encode()).hexdigest()


# --- models -----------------------------------------------------------------------------------------------------------


class ResNet(nn.Module):
    """A residual network as in Flax's examples: its dtype has a default, and reaches layers through partials."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        y = nn.relu(norm()(conv(8)(x)))
        y = norm(scale_init=nn.initializers.zeros_init())(conv(8)(y))
        y = nn.relu(norm(name="norm_proj")(conv(8, name="conv_proj")(x)) + y)
        return jnp.asarray(nn.Dense(3, dtype=self.dtype)(jnp.mean(y, axis=(1, 2))), self.dtype)


class Tied(nn.Module):
    """A model that also uses its embeddings to compute the logits."""

    hand: Any = None

    def setup(self) -> None:
        self.embed = nn.Embed(8, 8, dtype=self.hand)
        self.hidden = nn.Dense(8, dtype=self.hand)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.embed.attend(self.hidden(self.embed(ids)))


class Linear(nn.Module):
    """A layer without a ``dtype`` field, with casts by hand if ``hand`` is set."""

    features: int = 8
    hand: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.normal(), (self.features,))
        if self.hand is not None:
            x, kernel, bias = (value.astype(self.hand) for value in (x, kernel, bias))
        return jnp.dot(x, kernel) + bias


class MLP(nn.Module):
    features: tuple[int, ...] = (8, 8)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.features:
            x = nn.relu(nn.Dense(width)(x))
        return x
