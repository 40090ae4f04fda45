"""One NNX module under a policy: its class, and what happens when one of its methods is called.

A module under a policy is an instance of a subclass of its class in which methods called from outside run as was
decided. While one of a module without a ``dtype`` attribute runs, the module's own Params are read as casts of them, so
that gradients reach the float32 Params through the casts. What is stored are never the casts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from flax import nnx

from jaxmp import tree as _tree
from jaxmp._jaxpr.loops import as_carry, is_loop_body
from jaxmp._jaxpr.weak import products_in, strengthen, weaken
from jaxmp._nnx_autocast import run_autocast
from jaxmp._nnx_variables import cast_variable, is_container_class, is_object, own_variables
from jaxmp.policy import Policy

# What modules computed stays in the dtype they computed it in. All other variables keep the dtypes they have.
_ACTIVATIONS = (nnx.Cache, nnx.Intermediate)
# Of methods with such names these compute; the others are how Python and Flax handle an object.
_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "pow", "rshift", "or", "and")
_SPECIAL_METHODS = {"__call__", "__getitem__", "__neg__", *(f"__{r}{name}__" for name in _OPERATORS for r in ("", "r"))}


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a module computes; the same for modules of one class that differ in nothing else, as transforms want it.

    Attributes:
      policy: what it computes in; under autocast that of the whole model.
      is_root: whether its results are cast to the policy's output dtype.
      casts_params: whether its methods see its own params in the compute dtype; else its ``dtype`` attribute says it.
      inputs: what becomes of them: cast to the compute dtype; or made to follow, so that they keep their digits on the
        way to a submodule and take the dtype of the first param that they meet; or nothing.
      given: the attributes that the policy replaced, as the author gave them.
      autocast: whether autocast decides, and nothing else counts but
      asked: what an override asks of it.
      level: how many modules of the same class are around it for which the same was decided, so that one that is nested
        in another is told from a copy that a transform has made.
    """

    policy: Policy
    is_root: bool
    casts_params: bool
    inputs: Literal["cast", "follow"] | None
    given: tuple[tuple[str, Any], ...]
    autocast: bool = False
    asked: Literal["float32", "half"] | None = None
    level: int = 0


def decision_of(node: Any) -> Decision | None:
    """What was decided for a module, or for the module that a container belongs to; None if it is under no policy."""
    return getattr(type(node), "jaxmp_decision", None)


def bare_class(node: Any) -> Any:
    """The class of a module or a container as its author wrote it."""
    return getattr(type(node), "jaxmp_bare_class", type(node))


@functools.cache
def policied_class(bare: Any, decision: Decision) -> Any:
    """The subclass of ``bare``, a class of modules or of containers, whose instances do as was decided."""

    def get_attribute(self: Any, name: str) -> Any:
        value, frame = bare.__getattribute__(self, name), _running.frame_of(self)
        return value if frame is None or name == "__dict__" else frame.read(value)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        frame = _running.frame_of(self)
        bare.__setattr__(self, name, value if frame is None else frame.stored(value))

    def set_key(self: Any, key: Any, value: Any) -> None:
        with _running.hidden():  # a transform in a method updates the Params and not the casts of them
            bare._graph_node_set_key(self, key, value)

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"jaxmp_decision": decision, "jaxmp_bare_class": bare, "__reduce__": _reduce}
        namespace |= {"__module__": bare.__module__, "__qualname__": bare.__qualname__, "__doc__": bare.__doc__}
        if not is_container_class(bare):
            namespace |= {name: _entrance(method) for name, method in _methods(bare)}
        if decision.casts_params:
            namespace |= {"__getattribute__": get_attribute, "__setattr__": set_attribute}
            namespace |= {"_graph_node_set_key": set_key}

    return types.new_class(bare.__name__, (bare,), {"pytree": bare._pytree__is_pytree}, fill)


def _reduce(self: Any) -> Any:
    return _unpickle, (bare_class(self), decision_of(self)), dict(vars(self))


def _unpickle(bare: Any, decision: Decision) -> Any:
    return object.__new__(policied_class(bare, decision))


def _methods(bare: Any) -> Iterator[tuple[str, Any]]:
    """What the author's classes define and is called on an instance; not ``__init__`` and its like."""
    own = [cls for cls in bare.__mro__ if cls not in nnx.Module.__mro__]
    for name in {name for cls in own for name in vars(cls)}:
        if name.startswith("__") and name not in _SPECIAL_METHODS:
            continue
        method = inspect.getattr_static(bare, name)
        is_descriptor = isinstance(method, (functools.partialmethod, functools.singledispatchmethod))
        is_function = callable(method) and not isinstance(method, (type, staticmethod))
        if is_descriptor or (is_function and hasattr(method, "__get__")):
            yield name, method


def _entrance(method: Any) -> Callable[..., Any]:
    @functools.wraps(getattr(method, "func", method), updated=())
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self).jaxmp_decision.autocast:
            return run_autocast(self, method, args, kwargs)
        return _run(self, method.__get__(self, type(self)), args, kwargs)

    return enter


class _Frame:
    """A method that runs: of which class, the precision of products around it all, and the casts that it has read."""

    def __init__(self, module: Any, caller: _Frame | None) -> None:
        self.cls, self.decision = type(module), type(module).jaxmp_decision
        config: Any = jax.config
        self.ambient_precision: str | None = caller.ambient_precision if caller else config.jax_default_matmul_precision
        self._casts: dict[int, nnx.Variable[Any]] = {}  # by the id of the Param
        self._params: dict[int, nnx.Variable[Any]] = {}  # by the id of the cast

    def read(self, value: Any) -> Any:
        """``value`` with Params as casts of them, each the same one whenever it is read."""
        return _map_variables(self._cast, value)

    def _cast(self, var: nnx.Variable[Any]) -> nnx.Variable[Any]:
        if not isinstance(var, nnx.Param) or id(var) in self._params:
            return var
        if id(var) not in self._casts:
            cast = self._casts[id(var)] = cast_variable(var, self.decision.policy.compute_dtype)
            self._params[id(cast)] = var
        return self._casts[id(var)]

    def stored(self, value: Any) -> Any:
        """``value`` with the Params in place of casts of them; what is a new Param gets the param dtype."""

        def store(var: nnx.Variable[Any]) -> nnx.Variable[Any]:
            is_new = isinstance(var, nnx.Param) and id(var) not in self._params
            return cast_variable(var, self.decision.policy.param_dtype) if is_new else self._param(var)

        return _map_variables(store, value)

    def returned(self, value: Any) -> Any:
        """``value`` with the Params in place of casts of them."""
        return _map_variables(self._param, value)

    def _param(self, var: nnx.Variable[Any]) -> nnx.Variable[Any]:
        return self._params.get(id(var), var)


def _map_variables(change: Callable[[nnx.Variable[Any]], Any], value: Any) -> Any:
    """``value`` with its Variables changed, itself where none is; modules and containers of NNX are left alone."""
    if isinstance(value, nnx.Variable):
        return change(value)
    if is_object(value) or callable(value):
        return value
    leaves, structure = jax.tree.flatten(value, is_leaf=is_object)
    changed = [change(leaf) if isinstance(leaf, nnx.Variable) else leaf for leaf in leaves]
    return (
        value if all(a is b for a, b in zip(leaves, changed, strict=True)) else jax.tree.unflatten(structure, changed)
    )


class _Running(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """While this lasts, no method runs."""
        frames, self.frames = self.frames, []
        try:
            yield
        finally:
            self.frames = frames

    def frame_of(self, node: Any) -> _Frame | None:
        """The innermost frame if it is of ``node`` (or of one that it is a transform's copy of) or of its owner."""
        frame = self.frames[-1] if self.frames else None
        if frame is None or frame.decision != type(node).jaxmp_decision:
            return None
        return frame if type(node) is frame.cls or is_container_class(bare_class(node)) else None


_running = _Running()


def _run(module: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a method of ``module``; one that another of its methods calls, perhaps in a transform, just runs."""
    decision, frames = type(module).jaxmp_decision, _running.frames
    caller = frames[-1] if frames else None
    is_inside, is_outermost = (
        caller is not None and caller.cls is type(module),
        all(f.cls is not type(module) for f in frames),
    )
    with _dtypes_kept(module):
        result = method(*args, **kwargs) if is_inside else _run_from_outside(module, method, args, kwargs, caller)
    if decision.is_root:
        return _arrays(decision.policy.cast_to_output, result) if is_outermost else result
    if args and is_loop_body(sys._getframe(1), _run.__code__):
        return as_carry(result, args[0])
    return result


def _run_from_outside(module: Any, method: Callable[..., Any], args: Any, kwargs: Any, caller: _Frame | None) -> Any:
    decision = type(module).jaxmp_decision
    policy, follows = decision.policy, decision.inputs == "follow"
    comes_weak = caller is not None and caller.decision.inputs == "follow"
    inputs = _arrays(strengthen, (args, kwargs)) if comes_weak else (args, kwargs)
    if decision.inputs is not None:
        inputs = _arrays(weaken if follows else policy.cast_to_compute, inputs)
    frame = _Frame(module, caller)
    wanted = policy.matmul_precision
    # Only where it changes: a module may have set a precision of its own around a submodule.
    changes = wanted != (caller.decision.policy.matmul_precision if caller else None)
    precision = jax.default_matmul_precision(wanted or frame.ambient_precision) if changes else contextlib.nullcontext()
    _running.frames.append(frame)
    try:
        with precision, products_in(policy.compute_dtype if follows else None):
            result = frame.returned(method(*inputs[0], **inputs[1]))
    finally:
        _running.frames.pop()
    if follows:
        result = _arrays(strengthen, result)
    return _arrays(weaken, result) if comes_weak else result


def _arrays(convert: Callable[[Any], Any], tree: Any) -> Any:
    """``convert`` on the arrays of ``tree`` outside modules, rngs and other objects of NNX, which are left alone."""
    return jax.tree.map(lambda leaf: leaf if is_object(leaf) else convert(leaf), tree, is_leaf=is_object)


@contextlib.contextmanager
def _dtypes_kept(module: Any) -> Iterator[None]:
    """Variables of ``module`` that hold a floating array, other than Params, have its dtype afterwards too."""
    kept = [(var, var.get_raw_value().dtype) for var in own_variables(module) if _keeps_dtype(var)]
    yield
    for var, dtype in kept:
        value = var.get_raw_value()
        if _tree.is_float_array(value) and value.dtype != dtype:
            var.set_raw_value(value.astype(dtype))


def _keeps_dtype(var: nnx.Variable[Any]) -> bool:
    return not isinstance(var, (nnx.Param, *_ACTIVATIONS)) and _tree.is_float_array(var.get_raw_value())
