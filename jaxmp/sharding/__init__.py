"""Params over many devices: specs, gathers in half precision, sums of gradients in float32.

JAX's own partitioner moves the data. The specs of params come from :func:`fsdp_specs`. A :class:`Sharding` tells a
train step where its state lies. :func:`gather` gathers weights in half by hand, and :func:`describe` shows what each
device holds.

Fully sharded data parallelism: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), Zhao et al. 2023 (arXiv:2304.11277).
"""

from jaxmp.sharding.fsdp import Description as Description
from jaxmp.sharding.fsdp import describe as describe
from jaxmp.sharding.fsdp import fsdp_specs as fsdp_specs
from jaxmp.sharding.gather import gather as gather
from jaxmp.sharding.mesh_plan import Sharding as Sharding

__all__ = ["Description", "Sharding", "describe", "fsdp_specs", "gather"]
