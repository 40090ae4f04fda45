"""Convert arrays where they enter and leave a module under a policy.

The adapters of Linen and NNX share this code. A module with a ``dtype`` field computes in the dtype of the field. A
module with params and without a ``dtype`` field is traced in float32, and the engine decides which operations are in
half precision. Half inputs of such a module are widened to float32 by a cast that the engine ignores. The results are
returned in the compute dtype. Autocast of a whole model ignores the ``dtype`` fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.equations import evaluate
from jaxmp._internals.jax.program import TracedProgram, arrays_in, is_array
from jaxmp._internals.jax.traces import is_tracing, trace_context
from jaxmp.base import trees as _tree
from jaxmp.base.donation import require_not_deleted
from jaxmp.base.dtypes import CASTABLE, is_half
from jaxmp.engine.autocast import computed
from jaxmp.engine.half_check import Reason
from jaxmp.engine.marks import computing, mark_of, widened
from jaxmp.engine.overrides import Level, levels_of
from jaxmp.engine.rules import Rules
from jaxmp.policy.patterns import OPERATIONS, checked_overrides, path_and_primitive, pattern_text
from jaxmp.policy.policies import Policy
from jaxmp.policy.policy_map import PolicyMap

Mode = Literal["written", "float32", "inputs", "autocast"]

# --- policies ---


def autocast_map(policy: Any, overrides: Mapping[Any, Any] | None) -> tuple[PolicyMap, dict[str, Level]]:
    """Return the policies of a model under autocast, and its overrides of operations."""
    policy_map = PolicyMap(policy)
    patterns = checked_overrides(overrides)
    for pattern, exception, _ in policy_map.rules:
        patterns.setdefault(pattern, exception)
    operations = {key: patterns.pop(key) for key in [*patterns] if _names_operations(key)}
    policies = PolicyMap(policy_map.root, patterns) if operations else PolicyMap(policy_map, overrides)
    half = policies.compute_dtype
    if half not in CASTABLE or not is_half(half):
        raise ValueError(
            f"autocast needs a policy with a half compute dtype, got {half.name}; use 'mixed_bfloat16' or "
            "'mixed_float16'"
        )
    for pattern, exception, _ in policies.rules:
        if exception.compute_dtype not in (np.float32, half):
            raise ValueError(
                f"an override of autocast must be 'float32' or 'half' (here {half.name}), but the override for "
                f"{pattern_text(pattern)!r} computes in {exception.compute_dtype.name}; write 'float32' or 'half'"
            )
    return policies, levels_of(operations, half)


def _names_operations(key: Any) -> bool:
    return isinstance(key, str) and (key.startswith(OPERATIONS) or bool(path_and_primitive(key)[1]))


def wrong_model(value: Any, library: str, function: str) -> TypeError:
    """Return the error for a ``value`` that is not a module instance."""
    other = "nnx" if library == "linen" else "linen"
    if isinstance(value, type):
        came, remedy = f"the class {value.__name__}", f"create an instance: {value.__name__}(...)"
    else:
        came, remedy = full_class_name(value), f"jaxmp.{other}.{function} takes modules of flax.{other}"
    return TypeError(f"jaxmp.{library}.{function} takes a flax.{library}.Module, got {came}; {remedy}")


def full_class_name(value: Any) -> str:
    """Return the full name of the class of ``value``.

    Errors show it, because the repr of the value could print all of its arrays.
    """
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_running_in(library: str) -> bool:
    """Return whether a method of a module under a policy is running.

    ``library`` is the library of the module, ``"linen"`` or ``"nnx"``.
    """
    run = sys.modules.get(f"jaxmp.{library}.run")
    return run is not None and run.is_running()


# --- fields ---


def is_floating(dtype: Any) -> bool:
    """Return whether ``dtype`` is floating or None, so that a policy may replace it."""
    try:
        return dtype is None or bool(jnp.issubdtype(np.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def is_default(dtype: Any, default: Any) -> bool:
    """Return whether ``dtype`` is the ``default`` of its field.

    If a field has no default, its default counts as None.
    """
    if dtype is None or default is None or default is dataclasses.MISSING:
        return dtype is None
    return np.dtype(dtype) == np.dtype(default)


# --- borders ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Treatment:
    """How the code of a module is computed.

    Attributes:
      policy: the policy of the module.
      mode: one of these:

        - ``"written"``: the module computes in the dtype of its ``dtype`` field
        - ``"float32"``: the module is traced in float32, and the engine decides
        - ``"inputs"``: the module is traced in the dtypes of its inputs, and the engine decides
        - ``"autocast"``: autocast decides on the whole model

      override: the level of the override that covers the module under autocast, if any.
      not_half: the reason why the module does not compute in half; None if it does.
    """

    policy: Policy
    mode: Mode
    override: Level | None = None
    not_half: Reason | None = dataclasses.field(default=None, compare=False)

    @property
    def is_float32(self) -> bool:
        """Return whether its code is traced in float32."""
        return self.mode == "float32"

    def called_by(self, caller: Treatment | None) -> Treatment:
        """Return the treatment in a call by a module with the treatment ``caller``.

        A module in the mode ``"inputs"`` is traced in float32 if its caller is traced in float32. Otherwise half
        results of its submodules would be widened permanently.
        """
        is_given_float32 = self.mode == "inputs" and caller is not None and caller.is_float32
        return dataclasses.replace(self, mode="float32") if is_given_float32 else self

    def mark(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the engine computes the code of a method."""
        if self.mode == "autocast":
            return mark_of(self.override) if self.override else contextlib.nullcontext()
        dtype = None if self.mode == "written" else self.policy.compute_dtype
        return computing(dtype, self.policy.matmul_precision, self.policy.float8)

    def products(self, caller: Treatment | None, ambient: str | None) -> contextlib.AbstractContextManager[Any]:
        """Return a context that sets the policy's precision of products.

        The context changes nothing if ``caller`` has the same precision, because the calling module may have set
        another precision around this call. ``ambient`` is the precision if the policy has no ``matmul_precision``.
        """
        wanted = self.policy.matmul_precision
        if self.mode == "autocast" or wanted == (caller.policy.matmul_precision if caller else None):
            return contextlib.nullcontext()
        return jax.default_matmul_precision(wanted or ambient)


def handed_out(
    result: Any,
    treatment: Treatment,
    caller: Treatment | None,
    arguments: set[int],
    map_arrays: Callable[..., Any] = jax.tree.map,
) -> Any:
    """Return the result of a method in the dtypes that its caller expects.

    Args:
      result: a tree.
      treatment: how the method was computed.
      caller: how its caller is computed; None outside of modules.
      arguments: the ids of the method's arguments. An argument that the method returns is not rounded.
      map_arrays: a function that maps a function over the arrays of a tree.
    """
    if caller is not None and caller.is_float32:
        return map_arrays(widen_for_float32_code, result)
    if treatment.is_float32:
        half = treatment.policy.compute_dtype
        return map_arrays(lambda leaf: leaf if id(leaf) in arguments else narrow(leaf, half), result)
    return result


def widen_for_float32_code(value: Any) -> Any:
    """Return a leaf for code that is traced in float32: half arrays are widened."""
    return widened(jnp.asarray(value)) if _tree.is_float_array(value) and is_half(value.dtype) else value


def narrow(value: Any, dtype: np.dtype) -> Any:
    """Round a float32 result of code that is traced in float32, if ``dtype`` is half."""
    is_rounded = _tree.is_float_array(value) and value.dtype == np.float32 and is_half(dtype)
    return value.astype(dtype) if is_rounded else value


def same_structure(tree: Any, other: Any) -> bool:
    """Return whether two pytrees have the same structure."""
    structure: Any = jax.tree.structure
    return bool(structure(tree) == structure(other))


def like(new: Any, old: Any) -> Any:
    """Return ``new`` in the dtype of ``old``, if ``old`` is a floating array."""
    return _tree.cast(new, old.dtype) if _tree.is_float_array(old) else new


# --- eager calls ---


def remembered(programs: dict[Any, Any], key: Any, fun: Callable[..., Any], rules: Rules, args: tuple[Any, ...]) -> Any:
    """Compute ``fun(*args)`` under ``rules``, and cache its program for eager calls.

    An eager call then need not trace ``fun`` again. It runs the operations of the cached program one by one, as JAX
    does outside of ``jit``.

    Args:
      programs: the programs of earlier calls, which are dropped if they become too many.
      key: everything that ``fun`` depends on besides its arguments, compared by ``==``.
      fun: a pure function.
      rules: the rules for the operations of ``fun``.
      args: the arguments of ``fun``.

    Raises:
      RuntimeError: an array among the arguments of an eager call was deleted.
    """
    leaves, tree = jax.tree.flatten(args)
    operands = arrays_in(leaves)
    if is_tracing() or any(isinstance(leaf, jax.core.Tracer) for leaf in operands):
        return computed(fun, rules, args, {})
    require_not_deleted(args)
    statics = tuple(None if is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
    program_key = (key, tree, statics, tuple(map(jax.typeof, operands)), trace_context())
    try:
        hash(program_key)
    except TypeError:  # an argument or a field has no hash
        return computed(fun, rules, args, {})
    program = programs.get(program_key)
    if program is None:
        program = TracedProgram(lambda *args: computed(fun, rules, args, {}), args)
        if len(programs) >= 64:
            programs.clear()
        programs[program_key] = program
    jaxpr, consts = program.jaxpr
    return program.unflatten(evaluate(jaxpr, consts, operands))
