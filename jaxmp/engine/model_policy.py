"""The policy of a model, and how each of its modules is computed.

The adapters of Linen and NNX share this code. A call of a model is traced in float32, and the engine decides the dtype
of each operation. The calls of modules are scopes on JAX's name stack, with marks that name the dtypes of their
policies. Half arrays that enter code of the model are widened to float32 by a cast that the engine ignores.

Two kinds of modules run as they are written: those whose author set a ``dtype``, and those with the level
``"written"``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base import trees as _tree
from jaxmp.base.dtypes import is_half, is_narrow
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.marks import computing, widened
from jaxmp.engine.overrides import Level, levels_of
from jaxmp.policy.patterns import OPERATIONS, Path, checked_overrides, path_and_primitive
from jaxmp.policy.policies import Policy
from jaxmp.policy.policy_map import PolicyMap


class AuthorDtypes(NamedTuple):
    """The dtypes that the author of a module set.

    Each adapter finds them in its own way: a Linen module has fields, and an NNX module has a constructor.

    Attributes:
      dtype: the ``dtype`` of the module, if its author set it.
      param_dtype: the ``param_dtype`` of the module, if its author set it.
      has_dtype: whether the module has a ``dtype`` that a policy may set.
    """

    dtype: np.dtype | None
    param_dtype: np.dtype | None
    has_dtype: bool


@dataclasses.dataclass(frozen=True)
class ModelPolicy:
    """The policy of a model, with its overrides.

    Attributes:
      policies: the policy, and the overrides of modules.
      operations: the overrides of operations, such as ``("primitive:exp", "half")``.
      modules_before: for each path with a primitive, such as ``("layer:add", 0)``, the number of overrides of modules
        that come before it. The first override that matches wins.
      stores: whether params are stored in the param dtype, and results are cast to the output dtype. ``apply_policy``
        does both, ``autocast`` does neither.
      has_scope: whether the model itself has a scope, as in Linen. Paths of operations then begin with its name.
    """

    policies: PolicyMap
    operations: tuple[tuple[str, Level], ...] = ()
    modules_before: tuple[tuple[str, int], ...] = ()
    stores: bool = True
    has_scope: bool = False

    @classmethod
    def create(cls, policy: Any, overrides: Mapping[Any, Any] | None, stores: bool) -> ModelPolicy:
        """Return the policy of a model from the arguments of ``apply_policy`` or ``autocast``."""
        policy_map = PolicyMap(policy)
        patterns = checked_overrides(overrides)
        if any(map(_names_operations, policy_map.patterns)):  # as in a file that tune has saved
            patterns = {**{override.pattern: override.level for override in policy_map.overrides}, **patterns}
            policy_map = PolicyMap(policy_map.root)
        operations, modules, modules_before = {}, {}, {}
        for key, value in patterns.items():
            if not _names_operations(key):
                modules[key] = value
                continue
            operations[key] = value
            if not key.startswith(OPERATIONS):
                modules_before[key] = len(modules)
        levels = levels_of(operations, policy_map.compute_dtype)
        return cls(PolicyMap(policy_map, modules), tuple(levels.items()), tuple(modules_before.items()), stores)

    @property
    def default(self) -> Policy:
        """Return the policy of the modules that no override matches."""
        return self.policies.root

    def in_scope(self, name: str) -> ModelPolicy:
        """Return a copy for a model that has a scope of this name.

        The paths of overrides may begin with the name.
        """
        return dataclasses.replace(self, policies=self.policies.below(name), has_scope=True)

    def __str__(self) -> str:
        operations = [f"{key} -> {level}" for key, level in self.operations]
        return "; ".join([str(self.policies), *operations])

    def classifier(self) -> Classifier:
        """Return a classifier for the operations of a call of the model."""
        half = self.policies.compute_dtype if is_half(self.policies.compute_dtype) else None
        modules_before = dict(self.modules_before)
        return Classifier(half, dict(self.operations), self.policies.float8, self.has_scope, modules_before)

    def cast_to_output(self, result: Any) -> Any:
        """Return the result of the model in the output dtype."""
        return self.default.cast_to_output(result) if self.stores else result

    def treatment(self, path: Path, classes: Mapping[Path, type | tuple[type, ...]], author: AuthorDtypes) -> Treatment:
        """Return how the module at ``path`` is computed.

        Args:
          path: the path of the module, from the model down.
          classes: the classes of this module and of the modules above it, by path.
          author: the dtypes that the author of the module set.
        """
        policy, pattern = self.policies.resolve(path, classes)
        number = None if pattern is None else self.policies.patterns.index(pattern)
        if pattern is not None:  # an override wins over the author
            author = AuthorDtypes(None, None, author.has_dtype)
        written: Literal["", "dtype", "operands"] = ""
        if author.dtype is not None or (policy.written and author.has_dtype):
            written = "dtype"
        elif policy.written:
            written = "operands"
        dtype = policy.compute_dtype if written else np.dtype(np.float32)
        casts_params = self.stores and author.param_dtype is None
        casts_caches = self.stores and not written and is_half(policy.compute_dtype)
        return Treatment(
            policy=policy,
            written=written,
            dtype=dtype if author.dtype is None else None,
            override=number,
            all_half=number is not None and self.policies.overrides[number].all_half,
            param_dtype=policy.param_dtype if casts_params else None,
            cache_dtype=policy.compute_dtype if casts_caches else None,
        )


def _names_operations(key: Any) -> bool:
    return isinstance(key, str) and (key.startswith(OPERATIONS) or bool(path_and_primitive(key)[1]))


VariableKind = Literal["param", "cache", "activation", "other"]
"""The kind of a variable: how it is stored. Activations are intermediates and perturbations. Batch statistics are of
the kind ``"other"``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Treatment:
    """How a module is computed.

    Attributes:
      policy: the policy of the module.
      written: empty if the engine decides. Otherwise the code runs as it is written, and the text says who casts: Flax
        casts to the ``"dtype"`` of the module, or jaxmp casts the ``"operands"``, which are arguments and params.
      dtype: the value that replaces the ``dtype`` of the module. It is float32 for code that the engine decides, and
        the compute dtype for code that runs as it is written. None to keep the author's ``dtype``.
      override: the number of the override that names the module; None if there is none. It wins over the author's
        dtypes, and over overrides of operations that come after it.
      all_half: whether this override has the level ``"half"``, which makes every operation of the module half.
      param_dtype: the dtype in which new params are stored; None to store them as they are initialised.
      cache_dtype: the dtype in which new float32 caches are stored; None to store them as they are created.
    """

    policy: Policy
    written: Literal["", "dtype", "operands"]
    dtype: np.dtype | None
    override: int | None
    all_half: bool
    param_dtype: np.dtype | None
    cache_dtype: np.dtype | None

    def mark(self) -> contextlib.AbstractContextManager[None]:
        """Return the scope in which the methods of the module run."""
        dtype = None if self.written else self.policy.compute_dtype
        return computing(dtype, self.policy.matmul_precision, self.policy.float8, self.override, self.all_half)

    def convert_for_code(self, value: Any, is_operand: bool = True) -> Any:
        """Return a leaf in the dtype in which the code of the module reads it.

        Code that the engine decides reads half arrays in float32. ``is_operand`` says whether the leaf is an argument
        or a param, which jaxmp casts for some code that runs as it is written.
        """
        if not self.written:
            return _widen(value)
        is_cast = is_operand and self.written == "operands" and _is_narrow_float(value)
        return value.astype(self.policy.compute_dtype) if is_cast else value

    def round_param(self, value: Any) -> Any:
        """Return a leaf of a param, rounded to the dtype in which new params of the module are stored."""
        is_rounded = is_half(self.param_dtype) and _tree.is_float_array(value) and not is_narrow(value.dtype)
        return value.astype(self.param_dtype) if is_rounded else value

    def convert_for_storage(self, value: Any, old: Any, kind: VariableKind) -> Any:
        """Return a value that the module writes to a variable, in the dtypes in which it is stored.

        ``old`` is the value that the variable had before, or None.
        """
        structure: Any = jax.tree.structure
        if old is not None and structure(value) == structure(old):
            return jax.tree.map(lambda new, old: self._convert_leaf(new, old, kind), value, old)
        return jax.tree.map(lambda new: self._convert_leaf(new, None, kind), value)

    def _convert_leaf(self, value: Any, old: Any, kind: VariableKind) -> Any:
        if kind == "activation" or not _tree.is_float_array(value):
            return value
        if _tree.is_float_array(old):
            return _tree.cast(value, old.dtype)
        if kind == "param" and self.param_dtype is not None:
            return _tree.cast(value, self.param_dtype)
        if kind == "cache" and self.cache_dtype is not None and value.dtype == np.float32:
            return value.astype(self.cache_dtype)
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class MethodCall:
    """A running method of a module.

    Attributes:
      module: the module.
      path: its path.
      treatment: how the module is computed.
      output: the policy of the model if the result is cast to its output dtype; None to keep the dtype of the result.
    """

    module: Any
    path: Path
    treatment: Treatment
    output: ModelPolicy | None = None


class CallStack:
    """The running methods of a model.

    Args:
      map_arrays: a function that applies another function to all arrays of a tree, as ``jax.tree.map`` does.
      has_policies: whether methods run under their policies; False to run them as they are written.
    """

    def __init__(self, map_arrays: Callable[..., Any], has_policies: bool = True) -> None:
        config: Any = jax.config
        self._ambient_precision: str | None = config.jax_default_matmul_precision
        self._map_arrays, self._has_policies = map_arrays, has_policies
        self._calls: list[MethodCall] = []

    @property
    def innermost(self) -> MethodCall | None:
        """Return the innermost running method; None if code outside of the model runs."""
        return self._calls[-1] if self._calls else None

    @contextlib.contextmanager
    def _enter(self, call: MethodCall) -> Iterator[None]:
        """Record that ``call`` is running in this context."""
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.pop()

    def run(self, call: MethodCall, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a method as the treatment of its module says.

        Arrays are converted where they enter code of another kind: code that the engine decides reads half arrays in
        float32, and code that runs as it is written reads the dtypes of its policy.
        """
        if not self._has_policies:
            with self._enter(call):
                return method(*args, **kwargs)
        treatment = call.treatment
        caller = self.innermost.treatment if self.innermost is not None else None
        if treatment.written or caller is None or caller.written:
            args, kwargs = self._map_arrays(treatment.convert_for_code, (args, kwargs))
        with treatment.mark(), self._matmul_context(treatment, caller), self._enter(call):
            result = method(*args, **kwargs)
        if call.output is not None:
            result = self._map_arrays(call.output.cast_to_output, result)
        if treatment.written and caller is not None and not caller.written:
            return self._map_arrays(_widen, result)
        return result

    def _matmul_context(self, treatment: Treatment, caller: Treatment | None) -> contextlib.AbstractContextManager[Any]:
        """Return a context that sets the policy's precision of products.

        The context changes nothing if ``caller`` has the same precision, because the calling module may have set
        another precision around this call.
        """
        wanted = treatment.policy.matmul_precision
        if wanted == (caller.policy.matmul_precision if caller else None):
            return contextlib.nullcontext()
        return jax.default_matmul_precision(wanted or self._ambient_precision)


def _widen(value: Any) -> Any:
    """Return a half array in float32, by a cast that the engine ignores; return other leaves unchanged."""
    return widened(jnp.asarray(value)) if _tree.is_float_array(value) and is_narrow(value.dtype) else value


def _is_narrow_float(value: Any) -> bool:
    return _tree.is_float_array(value) and value.dtype.itemsize <= 4


# --- dtype fields ---


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
    return is_floating(default) and np.dtype(dtype) == np.dtype(default)


# --- errors ---


def require_no_operations(policy: ModelPolicy, model: Any) -> None:
    """Raise a ValueError if the policy of a model inside of another model has overrides of operations."""
    if policy.operations:
        raise ValueError(
            f"overrides of operations hold for a whole call, got {policy.operations[0][0]!r} in the policy of a "
            f"{type(model).__name__} inside of another model; pass them to apply_policy of the outer model"
        )


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
