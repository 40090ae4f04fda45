"""One NNX module under a policy: its class, and what happens when one of its methods is called.

A module under a policy is an instance of a subclass of its class that differs in the methods. What runs is the method
of the bare class, on a shadow of the module: an object of the bare class with the same attributes, in which the params
of a module without a ``dtype`` attribute are replaced by casts of them. So a method that calls another, or hands itself
to a transform, never meets the policy twice, and gradients reach the float32 params through the casts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
from flax import nnx

from jaxmp import tree as _tree
from jaxmp._jaxpr.loops import as_carry, is_loop_body
from jaxmp._jaxpr.weak import products_in, strengthen, weaken
from jaxmp.policy import Policy

# What modules computed stays in the dtype they computed it in. All other variables keep the dtypes they have.
_ACTIVATIONS = (nnx.Cache, nnx.Intermediate)


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a module computes; the same for modules of one class that differ in nothing else, as transforms want it.

    Attributes:
      policy: what it computes in.
      is_root: whether its results are cast to the policy's output dtype.
      casts_params: whether its methods see its own params in the compute dtype; else its ``dtype`` attribute says it.
      inputs: what becomes of them: cast to the compute dtype; or made to follow, so that they keep their digits on the
        way to a submodule and take the dtype of the first param that they meet; or nothing.
      given: the attributes that the policy replaced, as the author gave them.
    """

    policy: Policy
    is_root: bool
    casts_params: bool
    inputs: Literal["cast", "follow"] | None
    given: tuple[tuple[str, Any], ...]


def decision_of(module: nnx.Module) -> Decision | None:
    """What was decided for ``module``; None if it is under no policy."""
    return getattr(type(module), "jaxmp_decision", None)


def bare_class(module: nnx.Module) -> Any:
    """The class of ``module`` as its author wrote it."""
    return getattr(type(module), "jaxmp_bare_class", type(module))


@functools.cache
def policied_class(bare: Any, decision: Decision) -> Any:
    """The subclass of ``bare`` whose methods run as was decided."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"jaxmp_decision": decision, "jaxmp_bare_class": bare, "__reduce__": _reduce}
        namespace |= {"__module__": bare.__module__, "__qualname__": bare.__qualname__, "__doc__": bare.__doc__}
        namespace |= {name: _entrance(method) for name, method in _methods(bare)}

    return types.new_class(bare.__name__, (bare,), {"pytree": bare._pytree__is_pytree}, fill)


def _reduce(self: Any) -> Any:
    return _unpickle, (bare_class(self), decision_of(self)), dict(vars(self))


def _unpickle(bare: Any, decision: Decision) -> Any:
    return object.__new__(policied_class(bare, decision))


def _methods(bare: Any) -> Iterator[tuple[str, Any]]:
    """What the classes below ``nnx.Module`` define and is called on an instance; not ``__init__`` and its like."""
    own = bare.__mro__[: bare.__mro__.index(nnx.Module)]
    for name in {name for cls in own for name in vars(cls)}:
        method = inspect.getattr_static(bare, name)
        if name.startswith("__") and name != "__call__":
            continue
        if callable(method) and hasattr(method, "__get__") and not isinstance(method, (type, staticmethod)):
            yield name, method


def _entrance(method: Any) -> Callable[..., Any]:
    @functools.wraps(method, updated=())
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, method, args, kwargs)

    return enter


class _Running(threading.local):
    """The decisions of the methods that run, the innermost last, and the precision of products outside them."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.ambient_precision: str | None = None


_running = _Running()


def _run(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    decision = type(module).jaxmp_decision
    policy, caller = decision.policy, _running.decisions[-1] if _running.decisions else None
    comes_weak, follows = caller is not None and caller.inputs == "follow", decision.inputs == "follow"
    inputs = _arrays(strengthen, (args, kwargs)) if comes_weak else (args, kwargs)
    if decision.inputs is not None:
        inputs = _arrays(weaken if follows else policy.cast_to_compute, inputs)

    products = products_in(policy.compute_dtype if follows else None)
    with _entered(decision, caller), _shadow(module, decision) as shadow, products:
        result = method.__get__(shadow, type(shadow))(*inputs[0], **inputs[1])

    result = module if result is shadow else result
    if follows:
        result = _arrays(strengthen, result)
    if decision.is_root:
        result = _arrays(policy.cast_to_output, result)
    elif args and is_loop_body(sys._getframe(1), _run.__code__):
        result = as_carry(result, args[0])
    return _arrays(weaken, result) if comes_weak else result


def _arrays(convert: Callable[[Any], Any], tree: Any) -> Any:
    """``convert`` on the arrays of ``tree`` outside modules, rngs and other objects of NNX, which are left alone."""
    return jax.tree.map(lambda leaf: leaf if _is_object(leaf) else convert(leaf), tree, is_leaf=_is_object)


def _is_object(node: Any) -> bool:
    return isinstance(node, (nnx.Pytree, nnx.Variable, nnx.State, nnx.GraphDef))


@contextlib.contextmanager
def _entered(decision: Decision, caller: Decision | None) -> Iterator[None]:
    """While a method runs: nested calls know of it, and products have its policy's precision."""
    if caller is None:
        config: Any = jax.config
        _running.ambient_precision = config.jax_default_matmul_precision
    wanted, ambient = decision.policy.matmul_precision, _running.ambient_precision
    # Only where it changes: a module may have set a precision of its own around a submodule.
    changes = wanted != (caller.policy.matmul_precision if caller else None)
    _running.decisions.append(decision)
    try:
        with jax.default_matmul_precision(wanted or ambient) if changes else contextlib.nullcontext():
            yield
    finally:
        _running.decisions.pop()


@contextlib.contextmanager
def _shadow(module: Any, decision: Decision) -> Iterator[Any]:
    """The object of the bare class on which a method of ``module`` runs; what the method sets is set on ``module``."""
    before = dict(vars(module))
    replaced: dict[Any, Any] = {}
    if decision.casts_params:
        dtype = decision.policy.compute_dtype
        replaced = replace_own(module, lambda var: cast_variable(var, dtype) if isinstance(var, nnx.Param) else var)
    dtypes = [(var, var.get_raw_value().dtype) for var in own_variables(module) if _keeps_dtype(var)]
    shadow = object.__new__(bare_class(module))
    vars(shadow).update(before | replaced)

    try:
        yield shadow
    finally:
        after = vars(shadow)
        for name in after.keys() | before.keys():
            if name not in after:
                vars(module).pop(name)
            elif name not in before or after[name] is not replaced.get(name, before[name]):
                vars(module)[name] = after[name]
    for var, dtype in dtypes:
        if var.get_raw_value().dtype != dtype:
            var.set_raw_value(var.get_raw_value().astype(dtype))


def cast_variable(var: nnx.Variable[Any], dtype: Any) -> nnx.Variable[Any]:
    """A Variable like ``var`` with its floating arrays in ``dtype``; ``var`` itself if they have it."""
    value = var[...] if var.ref else var.get_raw_value()
    cast = _tree.cast(value, dtype)
    same = all(a is b for a, b in zip(jax.tree.leaves(cast), jax.tree.leaves(value), strict=True))
    return var if same else var.copy(cast, ref=False)


def _keeps_dtype(var: nnx.Variable[Any]) -> bool:
    return not isinstance(var, (nnx.Param, *_ACTIVATIONS)) and _tree.is_float_array(var.get_raw_value())


# --- what belongs to a module and not to its submodules ---


def is_container(node: Any) -> bool:
    """Whether ``node`` holds what belongs to the module around it: an ``nnx.List`` does, an ``nnx.Sequential`` not."""
    return isinstance(node, nnx.Pytree) and not (isinstance(node, nnx.Module) and callable(node))


def items(node: Any) -> Iterator[tuple[Any, Any]]:
    """The names and values in a module, or in a container: a list, a tuple, a dict, an ``nnx.List`` and the like."""
    if isinstance(node, nnx.Pytree):
        yield from ((name, value) for name, value in vars(node).items() if not name.startswith("_pytree__"))
    elif isinstance(node, Mapping):
        yield from node.items()
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)


def own_variables(node: Any) -> Iterator[nnx.Variable[Any]]:
    """The Variables that belong to a module itself, those in its containers included."""
    for _, value in items(node):
        if isinstance(value, nnx.Variable):
            yield value
        elif not isinstance(value, nnx.Module) or is_container(value):
            yield from own_variables(value)


def replace_own(node: Any, change: Callable[[nnx.Variable[Any]], nnx.Variable[Any]]) -> dict[Any, Any]:
    """The names and new values in ``node`` where ``change`` of a Variable makes another; containers are copied."""
    replaced = {}
    for name, value in items(node):
        if isinstance(value, nnx.Variable):
            new: Any = change(value)
        elif isinstance(value, nnx.Module) and not is_container(value):
            new = value
        else:
            new = _with_items(value, replace_own(value, change))
        if new is not value:
            replaced[name] = new
    return replaced


def _with_items(container: Any, changes: dict[Any, Any]) -> Any:
    if not changes:
        return container
    if isinstance(container, nnx.Pytree):
        copy = object.__new__(type(container))
        vars(copy).update(vars(container) | changes)
        return copy
    if isinstance(container, Mapping):
        return type(container)({**container, **changes})  # type: ignore[call-arg]
    values = [changes.get(i, value) for i, value in enumerate(container)]
    return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
