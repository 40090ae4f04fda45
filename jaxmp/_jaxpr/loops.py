"""The carry of a loop keeps its dtype, whatever the modules in the loop's body compute in.

JAX has no hook that tells a function that it runs in the body of a loop, so the Python stack is asked; and which value
is the carry cannot be seen there: the first argument of a module is taken for it.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

import jax

from jaxmp.tree import cast, is_float_array

# Module, and how the qualified name of a function begins that calls the body. `lax.map` and `associative_scan` have no
# carry; Flax calls some bodies once more than JAX does.
_LOOPS = (
    ("jax._src.lax.control_flow.loops", ("scan.", "while_loop.", "_fori_scan_body_fun.", "_fori_body_fun.")),
    ("flax.core.axes_scan", ("",)),
    ("flax.core.lift", ("while_loop.",)),
    ("flax.nnx.transforms.iteration", ("ForiLoopBodyFn.", "WhileLoopBodyFn.")),
)
_OTHERS = (("jax._src.lax.control_flow.loops", ("map.", "associative_scan")),)


def is_loop_body(frame: FrameType | None, method: CodeType) -> bool:
    """Whether a loop with a carry calls what runs in ``frame``, with no frame of ``method`` in between."""
    while frame is not None and frame.f_code is not method:
        if _is_one_of(_OTHERS, frame):
            return False
        if _is_one_of(_LOOPS, frame):
            return True
        frame = frame.f_back
    return False


def _is_one_of(functions: Any, frame: FrameType) -> bool:
    module, name = frame.f_globals.get("__name__"), frame.f_code.co_qualname
    return any(module == known and name.startswith(names) for known, names in functions)


def as_carry(result: Any, carry: Any) -> Any:
    """The ``result`` of a loop's body with the new carry, all of it or its first part, in the dtypes of ``carry``."""
    if same_structure(result, carry):
        return jax.tree.map(_like, result, carry)
    if isinstance(result, tuple) and result and same_structure(result[0], carry):
        return (jax.tree.map(_like, result[0], carry), *result[1:])
    return result


def same_structure(tree: Any, other: Any) -> bool:
    """Whether two pytrees have the same structure."""
    structure: Any = jax.tree.structure
    return bool(structure(tree) == structure(other))


def _like(new: Any, old: Any) -> Any:
    return cast(new, old.dtype) if is_float_array(old) else new
