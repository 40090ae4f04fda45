"""Recompute values of a loss function in the backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmp.base.dtypes import closest_names
from jaxmp.policy.quantisation import RESIDUALS
from jaxmp.program import walk
from jaxmp.program.bodies import rebuild
from jaxmp.program.equations import Bodies, bodies_of, opened
from jaxmp.program.layers import Section, count_products, sections_of
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.rewriting import Rewriter
from jaxmp.program.traced_program import TracedProgram, arrays_in

REMAT: dict[str, Any] = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "float8": jax.checkpoint_policies.save_only_these_names(RESIDUALS),
}
"""jaxmp's names for policies of ``jax.checkpoint``."""


class NoLayersError(ValueError):
    """A loss function has no layers that could be recomputed one by one."""


def with_remat(loss_fn: Callable[..., Any], remat: Any) -> Callable[..., Any]:
    """Return the loss function with the rematerialisation that ``remat`` names.

    Raises:
      ValueError: ``remat`` is neither a policy nor the name of a rematerialisation.
    """
    if remat is None or remat == "none":
        return loss_fn
    if not callable(remat):
        # The other public functions of jax.checkpoint_policies return a policy and are not policies themselves.
        names = [n for n in dir(jax.checkpoint_policies) if n.endswith("_saveable") or n.startswith("checkpoint_")]
        policies = {**REMAT, **{name: getattr(jax.checkpoint_policies, name) for name in names}}
        if remat not in policies:
            known = closest_names(str(remat), ["none", "layers", *policies], 12)
            raise ValueError(f"unknown remat policy {remat!r}; known, nearest first: {known}")
        remat = policies[remat]
    return jax.checkpoint(loss_fn, policy=remat)


def recompute_layers(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of ``fun`` whose backward pass recomputes one layer at a time.

    Only the inputs of layers, and values outside of layers, are stored. A layer is a module in a stack of modules (see
    ``jaxmp/program/layers.py``), or one iteration of a scan. Layers that the author recomputes stay as they are. If the
    author recomputes only a part of a layer, such as its norm, the whole layer is recomputed.

    Raises:
      NoLayersError: the returned function raises it if ``fun`` has no layers.
    """

    def recomputing(*args: Any) -> Any:
        program = TracedProgram(fun, args)
        jaxpr, consts = program.open_jaxpr
        rewriter = _LayerRewriter()
        results = rewriter.evaluate(jaxpr, consts, arrays_in(jax.tree.leaves(args)))
        if not rewriter.has_layers:
            raise NoLayersError(
                "remat='layers' recomputes each module of a stack, such as Block_0 and Block_1, and each iteration of "
                "a scan, but the loss function has none with a product.\nPut jax.named_scope around the layers, or "
                "write remat='dots'. (A policy adds scopes to an NNX model.)"
            )
        return program.unflatten(results)

    return recomputing


class _LayerRewriter(Rewriter):
    """A rewriter that puts each layer, and each iteration of a scan, in a ``jax.checkpoint``."""

    has_layers = False

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        sections = Section(jaxpr.invars, jaxpr.outvars, sections_of(jaxpr), constvars=jaxpr.constvars)
        return walk.interpreted(sections, consts, args, self._evaluate_section)

    def _evaluate_section(self, section: Section, operands: list[Any]) -> list[Any]:
        if not section.layer:
            return super().evaluate(section, (), operands)
        self.has_layers |= count_products(section) > 0
        return list(_recomputed(section, ())(operands))

    def evaluate_bodies(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> list[Any]:
        """Enter calls, and recompute the iterations of scans. Leave other bodies unchanged."""
        is_layer = bodies.is_recomputed or bodies.length is not None
        self.has_layers |= is_layer and count_products(opened(bodies.jaxprs[0])[0]) > 0
        if bodies.length is not None:
            # The forward and the backward scan are separate loops, so XLA cannot merge the recomputation.
            iteration = _recomputed(*opened(bodies.jaxprs[0]), prevent_cse=False)
            return rebuild(eqn, bodies, [lambda *args: iteration(args)])(*operands)
        if bodies.is_call and not (bodies.is_recomputed or bodies.has_rule):
            return super().evaluate_bodies(eqn, bodies, operands)
        return self.evaluate_operation(eqn, operands)


@dataclasses.dataclass(frozen=True)
class _LayerEvaluation(Rewriter):
    """An evaluation of a layer as it is, or without its checkpoints."""

    keeps_checkpoints: bool

    def evaluate_bodies(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> list[Any]:
        """Replace checkpoints by their bodies if they are not kept.

        Checkpoints in calls are replaced too. Other bodies are unchanged.
        """
        if self.keeps_checkpoints or not bodies.is_call or bodies.has_rule:
            return self.evaluate_operation(eqn, operands)
        if bodies.is_recomputed:
            return self.evaluate(*opened(bodies.jaxprs[0]), operands)
        return super().evaluate_bodies(eqn, bodies, operands)


def _recomputed(jaxpr: Any, consts: Sequence[Any], *, prevent_cse: bool = True) -> Callable[..., Any]:
    """Return a function of the arguments of an open jaxpr that evaluates it under ``jax.checkpoint``.

    Checkpoints of the author stay as they are if they contain all products. Otherwise this checkpoint replaces them.
    """
    has_checkpoint = any(map(_is_checkpoint, walk.equations(jaxpr)))
    if has_checkpoint and not _has_product_outside_of_checkpoints(jaxpr):
        return functools.partial(_LayerEvaluation(keeps_checkpoints=True).evaluate, jaxpr, consts)
    layer = functools.partial(_LayerEvaluation(keeps_checkpoints=False).evaluate, jaxpr, consts)
    return jax.checkpoint(layer, prevent_cse=prevent_cse)


def _has_product_outside_of_checkpoints(jaxpr: Any) -> bool:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name in PRODUCTS:
            return True
        if not _is_checkpoint(eqn) and any(map(_has_product_outside_of_checkpoints, walk.jaxprs_in(eqn))):
            return True
    return False


def _is_checkpoint(eqn: Any) -> bool:
    bodies = bodies_of(eqn)
    return bodies is not None and bodies.is_recomputed
