"""Train on many devices: half-precision gathers, float32 gradient sums.

XLA's partitioner moves the data. :func:`fsdp_specs` returns a ``PartitionSpec`` for each param. A :class:`Sharding`
sets the layout of a train step's state. In a step that you write yourself, :func:`gather` gathers weights in half
precision. :func:`describe` shows how many bytes each device holds.

The method is fully sharded data parallelism: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), Zhao et al. 2023
(arXiv:2304.11277).
"""

from jaxmp.sharding.fsdp import Description as Description
from jaxmp.sharding.fsdp import describe as describe
from jaxmp.sharding.fsdp import fsdp_specs as fsdp_specs
from jaxmp.sharding.gather import gather as gather
from jaxmp.sharding.mesh_plan import Sharding as Sharding

__all__ = ["Description", "Sharding", "describe", "fsdp_specs", "gather"]
