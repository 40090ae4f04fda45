"""Find large arrays that devices need not send to each other.

On a CPU nothing is found, because a CPU sends half arrays as float32 and uses all-reduce in place of reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxmp.base import tables
from jaxmp.inspect._audit.evidence import Audited, Fault, Faults, Sent

_LARGE = 1e6
"""Collectives of fewer bytes are not worth a finding."""


def float32_gathers(audited: Audited) -> Faults:
    """Find weights that are gathered in float32 in a program with half products."""
    what = "weights are gathered in float32 in a program with half products"
    for sent in _sent(audited, "all-gather"):
        if audited.has_half_products and sent.row.dtype == "float32" and sent.weights > _LARGE:
            yield _collective_fault(
                sent, sent.weights, what, "gather them with jaxmp.sharding.gather, which casts them first"
            )


def activation_gathers(audited: Audited) -> Faults:
    """Find activations that are gathered in place of weights."""
    remedy = (
        "gather the weights (jaxmp.sharding.gather), and keep activations split along the batch (on mesh axes of type "
        "Auto with jax.lax.with_sharding_constraint)"
    )
    for sent in _sent(audited, "all-gather"):
        if sent.others > _LARGE:
            yield _collective_fault(sent, sent.others, "activations are gathered instead of weights", remedy)


def gradient_all_reduces(audited: Audited) -> Faults:
    """Find gradients of split weights that are all-reduced, not reduce-scattered."""
    remedy = (
        "gather the weights with jaxmp.sharding.gather, which reduces and scatters their gradients at once; if a loop "
        "uses the weights, gather them outside of the loop"
    )
    for sent in _sent(audited, "all-reduce"):
        if sent.split > _LARGE:
            what = "gradients of split weights are summed whole on every device"
            yield _collective_fault(sent, sent.split, what, remedy)


def _sent(audited: Audited, kind: str) -> Iterator[Sent]:
    """Yield the collective operations of a kind, but nothing on a CPU."""
    if not audited.on_cpu:
        for sent in audited.sent:
            if sent.row.kind == kind:
                yield sent


def _collective_fault(sent: Sent, size: int, what: str, remedy: str) -> Fault:
    row = sent.row
    times = f"{row.count} times a call" if row.count > 1 else f"{row.count} time a call"
    amount = f"{tables.byte_text(size)} of {row.dtype} over {row.axis}"
    return Fault((row.path, row.source), f"{what}: {amount}, {times}", remedy)
