"""Memory and traffic of a train step that is split over GPUs that are not there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from experiments.models import GPT2, attention, stacked
from jaxmp.inspect import audit


def measure(model: GPT2, target: str, topology: str, sizes: dict[str, int]) -> dict[str, Any]:
    """What a train step of a model needs of each GPU of a cluster, and what that sends, in bytes.

    A GPU has 8 sequences of 1,024 tokens, or 2 that are longer.

    Args:
      model: its sizes.
      target: a name of :data:`jaxmp.inspect.targets.TARGETS`.
      topology: of the cluster, as in ``"1x2x4"``.
      sizes: of the mesh, by the names of its axes; it is split along the axis ``"fsdp"``, the batch along all.
    """
    axes = tuple(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), axes, (AxisType.Explicit,) * len(axes))
    tx = jaxmp.loss_scaling(optax.adamw(3e-4), jaxmp.NoOpLossScale())
    state = jax.eval_shape(lambda: jaxmp.TrainState.create(params=stacked.make_params(model), tx=tx))
    rules = {"**/kernel": P(None, "fsdp")}  # the first axis of a block's: what XLA gathers without another layout
    specs = jaxmp.sharding.fsdp_specs(state, mesh, rules=rules, stacked=["h"])
    step = jaxmp.make_train_step(stacked.loss_fn_of(model, specs.params, axes), clip_norm=1.0)

    def placed(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    examples = (2 if model.sequence > 1024 else 8) * mesh.size
    tokens = placed(jax.ShapeDtypeStruct((examples, model.sequence), jnp.int32), P(axes))
    args = jax.tree.map(placed, state, specs), {"inputs": tokens, "labels": tokens}
    with attention.implementation("cudnn"):
        found = audit(step, device=target, topology=topology)(*args)
    plan: Any = found.memory
    return {
        "topology": topology, "params": plan.params, "gpus": mesh.size,
        "batch": f"{examples}×{model.sequence}", "peak": plan.peak, "by_kind": plan.by_kind,
        "wire": plan.collectives.wire, "ideal": plan.ideal_wire,
        "sent": {" ".join(key): wire for key, wire in plan.collectives.totals.items()},
        # A bias is added in float32, so that its gradient is summed so; the rest of the cotangent goes there and back.
        "findings": [str(each) for each in found.findings if each.kind != "round-trip"],
    }  # fmt: skip
