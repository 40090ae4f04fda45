"""Update the small params of a model as one vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxmp.base.arguments import require_whole_number
from jaxmp.base.trees import nodes_of_type, path_name
from jaxmp.optim.checks import as_optimizer
from jaxmp.optim.low_precision import BEHIND_LOW_PRECISION, rounds_params
from jaxmp.optim.packed_tree import Layout, PackedTree, layout_of, packed_like, split_error, unpacked
from jaxmp.optim.packing_check import refusal, require_elementwise


@flax.struct.dataclass
class PackSmallState:
    """State of :func:`pack_small`.

    Attributes:
      inner_state: the state of the wrapped optimizer. Each tree of params in it is packed.
      layout: the params that are packed, a static field.
    """

    inner_state: Any
    layout: Layout = flax.struct.field(pytree_node=False)


def pack_small(inner: optax.GradientTransformation, below: int = 2**14) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it updates all small params as one vector.

    On a GPU, each bias and each scale of a norm costs several kernels that take longer to launch than to run. With
    ``pack_small``, the optimizer, the norm of the gradients and the test for non-finite gradients need one kernel for
    all of them. Large params do not change. The new params equal those of ``inner``, except for rounding errors: a
    global norm is summed in another order.

    ``inner`` must update each element on its own, such as Adam, AdamW, SGD or Lion. It may use global norms, such as
    ``optax.clip_by_global_norm``. Before the first update, both programs are traced and compared, so an optimizer that
    treats params differently is an error (LAMB, Adafactor, Muon, masks by path). Put :func:`jaxmp.loss_scaling` and
    ``optax.MultiSteps`` around ``pack_small``.

    The moments of small params are stored as vectors. ``flax.serialization`` saves them leaf by leaf, as it saves the
    state of ``inner``, so both optimizers can load each other's checkpoints. Before you save a
    :class:`jaxmp.TrainState` in another way, unpack it with ``state.with_tx(inner)``.

    Args:
      inner: the optimizer.
      below: floating params with fewer elements are packed. Params are packed together if they have the same dtype and
        number of dimensions.

    Raises:
      TypeError: ``inner`` is not an optimizer.
      ValueError: ``below`` is not a positive integer; ``inner`` does not update each element on its own, or has
        ``low_precision`` in it; a small param is split over devices; or ``update`` gets a tree with another structure
        or other shapes than ``init``.

    >>> tx = jaxmp.pack_small(optax.sgd(0.5, momentum=0.9))
    >>> params = {"bias": jnp.ones(2), "scale": jnp.ones(3), "kernel": jnp.ones((256, 256))}
    >>> jax.tree.map(jnp.shape, tx.init(params).inner_state[0].trace.vectors)
    {'float32_1d': (5,)}
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> updates["bias"]
    Array([-0.5, -0.5], dtype=float32)
    """
    require_whole_number("below", below)
    transform = _PackingTransform(as_optimizer(inner), below)
    tx = PackSmall(transform.init, transform.update)
    tx.transform = transform
    return tx


class PackSmall(optax.GradientTransformationExtraArgs):
    """The transform of :func:`pack_small`."""

    transform: _PackingTransform


@dataclasses.dataclass(frozen=True)
class _PackingTransform:
    """The arguments and the methods of the transform :func:`pack_small`.

    Attributes:
      checked: the shapes of the arguments for which the optimizer was checked.
    """

    inner: optax.GradientTransformationExtraArgs
    below: int
    checked: set[Hashable] = dataclasses.field(default_factory=set, compare=False)

    def init(self, params: optax.Params) -> PackSmallState:
        return self.wrap(self.inner.init(params), params)

    def wrap(self, inner_state: Any, params: optax.Params) -> PackSmallState:
        """Return the state of the inner optimizer as a state of ``pack_small``."""
        if rounds_params(inner_state):
            raise ValueError(BEHIND_LOW_PRECISION)
        layout = layout_of(params, self.below)
        try:
            example = jax.eval_shape(lambda params: self.inner.init(layout.pack(params)), params)
            return PackSmallState(packed_like(example, inner_state), layout)
        except Exception as error:  # an optimizer that reads the paths of params may raise anything
            raise ValueError(refusal("its state has another structure for packed params")) from error

    def update(
        self, updates: optax.Updates, state: PackSmallState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, PackSmallState]:
        if not isinstance(state, PackSmallState):
            raise TypeError(
                f"pack_small updates only its own state, got {type(state).__name__}; call tx.init again, or for a "
                "train state use state.with_tx(tx)"
            )
        layout = state.layout
        updates = layout.pack(updates)
        params = None if params is None else layout.pack(params)
        self._check(layout, updates, state.inner_state, params, extra_args)
        new_updates, inner_state = self.inner.update(updates, state.inner_state, params, **extra_args)
        return unpacked(new_updates), PackSmallState(inner_state, layout)

    def _check(self, layout: Layout, updates: Any, inner_state: Any, params: Any, extra_args: Any) -> None:
        """Raise a ValueError unless packing changes no number, once for all shapes."""
        leaves, structure = jax.tree.flatten((updates, inner_state, params))
        key = structure, tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves), tuple(extra_args)
        if key not in self.checked:
            require_elementwise(self.inner.update, layout, updates, inner_state, params, extra_args)
            self.checked.add(key)


def packed_as(opt_state: Any, tree: Any) -> Any:
    """Return ``tree`` packed like the params of a state of :func:`pack_small`.

    For any other state, return ``tree``.
    """
    return opt_state.layout.pack(tree) if isinstance(opt_state, PackSmallState) else tree


def require_packed_are_whole(opt_state: Any, params: Any, specs: Sequence[Any]) -> None:
    """Raise a ValueError if a spec splits a param that a :func:`pack_small` in ``opt_state`` packs.

    Args:
      opt_state: the state of an optimizer.
      params: the params of the optimizer.
      specs: the ``PartitionSpec`` of each param.
    """
    names = [path_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    for state in nodes_of_type(opt_state, PackSmallState):
        for group in state.layout.groups:
            for number in group.members:
                if any(entry is not None for entry in specs[number]):
                    raise split_error(names[number])


def without_packing(opt_state: Any) -> Any:
    """Return the state of the optimizer that :func:`pack_small` wraps."""
    return unpacked(opt_state.inner_state) if isinstance(opt_state, PackSmallState) else opt_state


def _saved_tree(tree: PackedTree) -> Any:
    return flax.serialization.to_state_dict(tree.unpacked())


def _restored_tree(target: PackedTree, saved: Any) -> PackedTree:
    example = jax.eval_shape(unpacked, target)
    return target.layout.pack(flax.serialization.from_state_dict(example, saved))


def _saved_state(state: PackSmallState) -> Any:
    return flax.serialization.to_state_dict(state.inner_state)


def _restored_state(target: PackSmallState, saved: Any) -> PackSmallState:
    return PackSmallState(flax.serialization.from_state_dict(target.inner_state, saved), target.layout)


flax.serialization.register_serialization_state(PackedTree, _saved_tree, _restored_tree, override=True)
flax.serialization.register_serialization_state(PackSmallState, _saved_state, _restored_state, override=True)
