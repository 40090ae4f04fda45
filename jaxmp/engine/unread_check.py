"""Warn of products in equations that autocast does not look into."""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxmp._internals.jax.sources import user_source_of
from jaxmp.base.user_warnings import warn_user
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.marks import DECIDED
from jaxmp.engine.nodes import Graph
from jaxmp.program.equations import aval_of, primitive_of
from jaxmp.program.primitives import PRODUCTS, Class, classify
from jaxmp.program.walk import equations, jaxprs_in


def warn_of_unread_products(graph: Graph, classifier: Classifier) -> None:
    """Warn of products that stay float32 because autocast cannot read the equation around them.

    The primitive of the equation is one that the table of primitives does not know, or whose bodies are not rebuilt.
    Kernels and solvers are not reported: they are opaque on purpose. Nor are regions that ask for float32.
    """
    unread = Counter[tuple[str, str]]()
    for step in graph.steps:
        name = primitive_of(step.eqn)
        if step.bodies is not None or DECIDED in step.names or classify(name) not in (None, Class.RECURSE):
            continue
        if step.region.level == "written" or classifier.half_of("dot_general", step.names) is None:
            continue
        for jaxpr in jaxprs_in(step.eqn):
            for eqn in equations(jaxpr):
                is_float32 = eqn.primitive.name in PRODUCTS and aval_of(eqn.invars[0]).dtype == np.float32
                unread[name, user_source_of(step.eqn)] += is_float32
    for (name, source), count in unread.items():
        if count:
            where = f" at {source}" if source else ""
            warn_user(
                f"autocast cannot read the primitive {name!r}{where}; products in it that stay float32: {count}.\n"
                "Cast their operands to half there, e.g. with x.astype(jaxmp.autocast_dtype()), or put the call in "
                "jaxmp.precision('float32') if float32 is right."
            )
