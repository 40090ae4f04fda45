"""Who reads the operands of a call, and in which dtype: an activation that all want in half is cast before the call."""

from __future__ import annotations

import numpy as np

from jaxmp._jaxpr import reading
from jaxmp.autocast.colour import operand_dtypes
from jaxmp.autocast.graph import Body, Step


def read_in(body: Body, position: int) -> np.dtype | None:
    """The half dtype that all who read an operand of a call want: then the call saves no float32 copy of it."""
    var = body.jaxpr.invars[position]
    if body.readers is None:
        body.readers = {}
        for step in body.steps:
            for n, atom in enumerate(step.eqn.invars):
                if not reading.is_literal(atom):
                    body.readers.setdefault(atom, []).append((step, n))
    dtypes = {_wanted_by(step, n) for step, n in body.readers.get(var, [])}
    dtype = dtypes.pop() if len(dtypes) == 1 and var not in body.jaxpr.outvars else None
    return dtype if dtype is not None and dtype.itemsize == 2 else None


def _wanted_by(step: Step, position: int) -> np.dtype | None:
    if step.bodies is None:
        return operand_dtypes(step)[position]
    if step.bodies.kind == "call":
        return read_in(step.inner[0], position)
    carried = position - step.bodies.consts - step.bodies.body_consts
    join = step.joins[carried] if step.bodies.carry > carried >= 0 else None
    return None if join is None else join.dtype
