"""The devices of a train step: those of its arrays, or a mesh.

A train step asks one of these two classes where to place a state and a batch, and how to run its parts there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp.program.hoisting import hoist
from jaxmp.sharding.gathered_loss import Gathered, GatheredParams
from jaxmp.sharding.mesh_plan import Sharding, on_auto_axes
from jaxmp.sharding.mesh_types import typed
from jaxmp.sharding.placement import at_home, home_of, is_put, placed_by_specs

LossFn = Callable[..., Any]


class Layout(NamedTuple):
    """The structure of a state, and the sharding of each leaf (None if it has none)."""

    structure: Any
    shardings: tuple[Any, ...]


class FlatState(NamedTuple):
    """A state with its leaves and its structure.

    With it, a call of a step flattens its state once for all checks.
    """

    state: Any
    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, state: Any) -> FlatState:
        """Flatten a state."""
        return cls(state, *jax.tree.flatten(state))

    def with_leaves(self, leaves: list[Any]) -> FlatState:
        """Return the state with other leaves."""
        return FlatState(jax.tree.unflatten(self.structure, leaves), leaves, self.structure)

    @property
    def layout(self) -> Layout:
        """Return the layout of the state."""
        return Layout(self.structure, tuple(map(_sharding_of, self.leaves)))

    @property
    def is_on_mesh(self) -> bool:
        """Return whether all leaves are on a mesh."""
        return bool(self.leaves) and all(isinstance(_sharding_of(leaf), NamedSharding) for leaf in self.leaves)


def _sharding_of(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None)


class MicrobatchLoss(NamedTuple):
    """The loss of a microbatch, and how its gradients become the gradients of the params.

    Attributes:
      loss_fn: a function of ``learned`` and of the other arguments of the loss function.
      learned: the tree to differentiate, usually the params.
      reduce: a function that turns the summed gradients of ``learned`` into those of the params.
    """

    loss_fn: LossFn
    learned: Any
    reduce: Callable[[Any], Any]


class DevicesOfArrays:
    """The devices on which the arrays of a call are.

    Uncommitted arrays move to the devices of the committed arrays.
    """

    def set(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a step runs."""
        return contextlib.nullcontext()

    def place_state(self, state: FlatState, batch: Any) -> FlatState:
        """Place the arrays of a state that are uncommitted."""
        home = home_of((state.leaves, batch))
        if home is None or all(map(is_put, state.leaves)):
            return state
        return state.with_leaves([at_home(leaf, home) for leaf in state.leaves])

    def place_batch(self, batch: Any, accumulate_steps: int) -> Any:
        """Place the examples of a batch."""
        return batch

    def around_gradients(self, gradients: Callable[..., Any], state: Any) -> Callable[..., Any]:
        """Return a function of ``(state, batch, rng)`` that computes gradients."""
        return gradients

    def around_update(self, update: Callable[..., Any], state: Any) -> Callable[..., Any]:
        """Return a function that updates a state."""
        return update

    def whole_loss(self, loss_fn: LossFn) -> LossFn:
        """Return the loss function as it runs on whole weights."""
        return loss_fn

    def loss_of_microbatch(self, loss_fn: LossFn, params: Any, other_args: Any, is_kept: Any) -> MicrobatchLoss:
        """Return the loss of a microbatch.

        Operations that depend only on the params are moved out of the loop over microbatches.

        Args:
          loss_fn: the loss function.
          params: the params.
          other_args: the other arguments of the loss function, for the first microbatch.
          is_kept: a policy for ``jax.checkpoint``, which decides which values are kept for the backward pass.
        """
        return MicrobatchLoss(hoist(loss_fn, params, other_args, is_kept), params, lambda grads: grads)


class DevicesOfMesh(DevicesOfArrays):
    """The devices of a mesh.

    Attributes:
      plan: the layout of the state.
      gathered: the loss function that gathers its weights.
      reduces_once: whether gradients are reduced once per step, and not once per microbatch.
    """

    def __init__(self, sharding: Sharding, loss_fn: LossFn, is_remat: bool) -> None:
        self.plan = sharding.plan()
        gathers_again = sharding.regather and not is_remat
        self.gathered = Gathered(self.plan, typed(loss_fn, sharding.mesh, self.plan.axes), gathers_again)
        self.reduces_once = sharding.reduce == "once" and self.gathered.is_split
        self._planned_layout: Layout | None = None

    def set(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the mesh is the current mesh."""
        return self.plan.set()

    def place_state(self, state: FlatState, batch: Any) -> FlatState:
        """Place a state by the specs of the mesh."""
        if state.layout != self._planned_layout:  # states that the step returned have this layout
            placed = jax.tree.map_with_path(placed_by_specs, state.state, self.plan.shardings(state.state))
            state = FlatState.of(placed)
            self._planned_layout = state.layout
        return state

    def place_batch(self, batch: Any, accumulate_steps: int) -> Any:
        """Split the examples of a batch over the devices."""
        with self.set():
            return self.plan.batch(batch, accumulate_steps)

    def around_gradients(self, gradients: Callable[..., Any], state: Any) -> Callable[..., Any]:
        """Return ``gradients`` on axes of type Auto."""
        replicated = PartitionSpec()
        specs = (replicated, self.plan.specs_of(state).params, replicated, replicated)
        return on_auto_axes(gradients, specs)

    def around_update(self, update: Callable[..., Any], state: Any) -> Callable[..., Any]:
        """Return ``update`` on axes of type Auto."""
        return on_auto_axes(update, self.plan.specs_of(state))

    def whole_loss(self, loss_fn: LossFn) -> LossFn:
        """Return the loss function before weights are gathered and values are recomputed."""
        return self.gathered.loss_fn

    def loss_of_microbatch(self, loss_fn: LossFn, params: Any, other_args: Any, is_kept: Any) -> MicrobatchLoss:
        """Return the loss of a microbatch.

        If gradients are reduced once per step, all weights are gathered before the loop over microbatches. The tree to
        differentiate then also has the taps of :class:`GatheredParams`: zeros whose cotangents are the gradients of the
        gathered weights.
        """
        if not self.reduces_once:
            if self.gathered.is_split:  # each microbatch gathers the weights itself
                return MicrobatchLoss(loss_fn, params, lambda grads: grads)
            return super().loss_of_microbatch(loss_fn, params, other_args, is_kept)
        gathered_params = self.gathered.gather(params, *other_args)
        loss_of_gathered = hoist(loss_fn, gathered_params, other_args, is_kept)

        def loss_of_learned(learned: Any, *other_args: Any) -> Any:
            params, taps = learned
            return loss_of_gathered(GatheredParams(params, gathered_params.weights, taps), *other_args)

        learned = (gathered_params.params, gathered_params.taps)
        return MicrobatchLoss(loss_of_learned, learned, lambda grads: self.gathered.reduced(*grads))
