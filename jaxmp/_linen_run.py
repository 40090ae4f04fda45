"""One run of a Linen module under policies, from the call of the root's method to its return.

While it lasts, a method interceptor stands between Linen and the modules that belong to the root. Before the first
method of one runs, its ``dtype`` and ``param_dtype`` fields are set as its policy says; a module without a ``dtype``
field gets its params in the compute dtype, and its inputs are cast or made to follow. What belongs to a root is told by
a flag in its scope: Linen hands it on to every scope below, through lifted transforms too, and ``nn.jit`` keys its
cache with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import Scope

from jaxmp import tree as _tree
from jaxmp._jaxpr.weak import promoting_weak_operands, strengthen, weaken
from jaxmp.dtypes import is_half
from jaxmp.patterns import Path, Pattern, is_class_pattern, pattern_text
from jaxmp.policy import Policy, PolicyMap

Variables = Mapping[str, Any]
_PARAMS = "params"
# Collections of what modules computed, in the dtype they computed it in. All others keep the dtypes of the bare module.
_ACTIVATIONS = ("cache", "intermediates", "perturbations")
_ROOT_FLAG, _OUTER_FLAG, _POLICY_FLAG, _DECISION = "jaxmp_root", "jaxmp_outer", "jaxmp_policy", "_jaxmp_decision"


@dataclasses.dataclass(frozen=True)
class Root:
    """What a module under policies knows: the policies, and its own path if it was reached through a bound parent."""

    policies: PolicyMap
    prefix: Path = ()

    def mark(self, module: nn.Module) -> None:
        """Marks the scope of ``module``, and so every scope below that is still to come, as belonging to this root."""
        scope: Any = module.scope
        if scope.flags.get(_ROOT_FLAG, hash(self)) != hash(self):
            _set_flag(scope, _OUTER_FLAG, scope.flags[_ROOT_FLAG])
        _set_flag(scope, _ROOT_FLAG, hash(self))


def _set_flag(scope: Scope, name: str, value: int) -> None:
    if scope.flags.get(name) != value:
        scope.flags = scope.flags.copy({name: value})


@dataclasses.dataclass(frozen=True)
class _Decision:
    """How one module computes: its policy, what becomes of its inputs, and why its products are not in half."""

    policy: Policy
    param_dtype: np.dtype
    inputs: Callable[[Any, Policy], Any] | None
    kept: str | None


class _Frame:
    """A method that is running; in one that follows, what comes in from outside is weakly typed (see `_follow`)."""

    def __init__(self, run: Run, path: Path, follows: bool) -> None:
        self.run, self.path, self.follows = run, path, follows


class _Running(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.frames: list[_Frame] = []
        self.intercepting = False

    def run_of(self, module: nn.Module) -> Run | None:
        """The innermost run that ``module`` belongs to."""
        if module.scope is None or _ROOT_FLAG not in module.scope.flags:
            return None
        token, path = module.scope.flags[_ROOT_FLAG], module.path
        return next((run for run in reversed(self.runs) if run.token == token and run.covers(path)), None)


_running = _Running()


def is_running(module: nn.Module | None = None) -> bool:
    """Whether a run of ``module`` as the root is under way; without an argument, whether any run is."""
    if module is None:
        return bool(_running.runs)
    run = _running.run_of(module)
    return run is not None and run.path == module.path


@contextlib.contextmanager
def running(
    module: nn.Module, root: Root, make_variables: Callable[[], Variables] | None, by_method: bool
) -> Iterator[Run]:
    """A run of ``module`` as the root.

    Args:
      module: bound to a scope.
      root: its policies.
      make_variables: when variables are about to be made, makes those of the module without policies.
      by_method: whether what runs is a method of the module, and not a function that calls some.
    """
    root.mark(module)
    run = Run(module, root, make_variables, by_method)
    outer_token = run.module.scope.flags.get(_OUTER_FLAG)
    for outer in _running.runs:
        if outer.token == outer_token and outer.covers(run.path):
            outer.nested.append(run.path[len(outer.path) :])
            outer.modules.setdefault(run.path[len(outer.path) :], type(module))
    first, _running.intercepting = not _running.intercepting, True
    _running.runs.append(run)
    try:
        run.decide(module)
        with nn.intercept_methods(_intercept) if first else contextlib.nullcontext():
            yield run
        run.finish()
    finally:
        _running.runs.remove(run)
        _running.intercepting = not first


def _intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    run = _running.run_of(context.module)
    if run is None:
        return next_fun(*args, **kwargs)
    return run.call(context.module, context.method_name, next_fun, args, kwargs)


class Run:
    """The modules met while a method of a root runs, and what was decided for each. Paths are relative to the root."""

    def __init__(
        self, module: Any, root: Root, make_variables: Callable[[], Variables] | None, by_method: bool
    ) -> None:
        self.module, self.path, self.token, self.by_method = module, module.path, hash(root), by_method
        self.policies, self.prefix, self.make_variables = root.policies, root.prefix, make_variables
        self.variables = self._foresee() if make_variables else _shapes(module.variables)
        self.modules: dict[Path, type] = {}
        self.decisions: dict[Path, _Decision] = {}
        self.called: set[Path] = set()
        self.products: dict[Path, _Decision] = {}
        self.nested: list[Path] = []
        config: Any = jax.config
        self.ambient_precision = config.jax_default_matmul_precision
        self.by_path = any(not is_class_pattern(pattern) for pattern in root.policies.patterns)

    def covers(self, path: Path) -> bool:
        return path[: len(self.path)] == self.path

    def _foresee(self) -> Variables | None:
        """The shapes of the variables to come: who owns params or has submodules decides how it is treated."""
        assert self.make_variables is not None
        try:
            return jax.eval_shape(self.make_variables)
        except Exception:  # the user's own error, which the run will raise again, or variables that are no arrays
            return None

    def _at(self, path: Path) -> Variables | None:
        """The collections at ``path`` before the run, or as they will be; None where they could not be foreseen."""
        if self.variables is None:
            return None
        found = {name: _descend(collection, path) for name, collection in self.variables.items()}
        return {name: collection for name, collection in found.items() if isinstance(collection, Mapping)}

    # --- what is decided for a module ---

    def decide(self, module: nn.Module, born_in: Scope | None = None) -> _Decision:
        """Sets ``module`` up for its policy, once, and remembers what was decided; ``born_in``: its scope to be."""
        scope: Any = born_in or module.scope
        path = scope.path[len(self.path) :]
        self.modules.setdefault(path, type(module))
        classes = {self.prefix + known: cls for known, cls in self.modules.items()}
        policy, pattern = self.policies.resolve(self.prefix + path, classes)
        _set_flag(scope, _POLICY_FLAG, hash((policy, pattern, self.prefix + path if self.by_path else None)))
        scope.push = functools.partial(_push, weakref.ref(scope), weakref.ref(module))
        decision = vars(module).get(_DECISION)
        if decision is None:
            decision = self._decide(module, path, policy, pattern)
            if self.variables is not None:
                object.__setattr__(module, _DECISION, decision)
        self.decisions[path] = decision
        return decision

    def _decide(self, module: nn.Module, path: Path, policy: Policy, pattern: Pattern | None) -> _Decision:
        here = self._at(path)
        has_children = here is not None and any(_children(collection) for collection in here.values())
        owns_params = here is None or bool(_own(here.get(_PARAMS, {})))

        defaults = {field.name: field.default for field in dataclasses.fields(module)}
        for name, dtype in (("param_dtype", policy.param_dtype), ("dtype", policy.compute_dtype)):
            if name not in defaults or not _is_floating(getattr(module, name)):
                continue
            # A container's None is left alone: what lies below follows its own path. A cell is one computation.
            container = has_children and not owns_params and not isinstance(module, nn.RNNCellBase)
            if name == "dtype" and module.dtype is None and container:
                continue
            if pattern is not None or _is_default(getattr(module, name), defaults[name]):
                object.__setattr__(module, name, dtype)

        own_param_dtype = getattr(module, "param_dtype", None) if "param_dtype" in defaults else None
        param_dtype = np.dtype(own_param_dtype or policy.param_dtype)
        computes = getattr(module, "dtype", None) if "dtype" in defaults else None
        if computes is not None and _is_floating(computes):
            reason = f"override {pattern_text(pattern)!r}" if pattern else f"its own dtype={np.dtype(computes).name}"
            return _Decision(policy, param_dtype, None, None if is_half(computes) else reason)

        _hand_out_params(module, policy, store="param_dtype" not in defaults)
        kept = None if is_half(policy.compute_dtype) else f"override {pattern_text(pattern or '**')!r}"
        cls: Any = type(module)
        owns_params = owns_params or (has_children and _asks_for_params(cls))
        inputs = None
        if owns_params or (pattern is not None and not has_children):
            inputs = _follow if owns_params and has_children else _cast
        return _Decision(policy, param_dtype, inputs, kept)

    # --- what is done for a call ---

    def call(self, module: nn.Module, method: str, next_fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a method of ``module``, which belongs to this run, as was decided for it."""
        decision = self.decide(module)
        if method == "setup":
            next_fun(*args, **kwargs)
            return self._decide_children(module)
        self._decide_children(module)
        path = module.path[len(self.path) :]
        self.called.add(path)
        if self._has_product(module, path, method):
            self.products[path] = decision

        caller = _running.frames[-1] if _running.frames else None
        # A helper method, or the body of a lifted transform: the inputs are already what they should be.
        inside = caller is not None and caller.run is self and caller.path == module.path
        follows = caller is not None and caller.follows and not inside
        inputs = strengthen((args, kwargs)) if follows else (args, kwargs)
        if decision.inputs is not None and not inside:
            inputs = decision.inputs(inputs, decision.policy)
        frame = _Frame(self, module.path, decision.inputs is _follow)
        _running.frames.append(frame)
        try:
            precision = decision.policy.matmul_precision or self.ambient_precision
            with jax.default_matmul_precision(precision), promoting_weak_operands(frame.follows):
                result = next_fun(*inputs[0], **inputs[1])
        finally:
            _running.frames.pop()
        self._keep_statistics(module, path)

        if frame.follows and not inside:
            result = strengthen(result)
        if self.by_method and (caller is None or caller.run is not self):  # before Linen captures it as an intermediate
            result = self.cast_output(result)
        result = _as_carry(result, args)
        return weaken(result) if follows else result

    def cast_output(self, result: Any) -> Any:
        return result if self.prefix else self.decisions[()].policy.cast_to_output(result)

    def _decide_children(self, module: nn.Module) -> None:
        # Before they are called: a parent may read their dtypes, or call a method that Linen does not wrap.
        for child in module._state.children.values():
            if isinstance(child, nn.Module) and not hasattr(child, "jaxmp_root") and _running.run_of(child) is self:
                self.decide(child)

    def _has_product(self, module: nn.Module, path: Path, method: str) -> bool:
        if isinstance(module, nn.Embed) and method != "attend":
            return False
        params = module.variables.get(_PARAMS) or (self._at(path) or {}).get(_PARAMS, {})
        return any(len(getattr(leaf, "shape", ())) >= 2 for leaf in _own(params))

    def _keep_statistics(self, module: nn.Module, path: Path) -> None:
        """Puts what ``module`` wrote to its collections into the dtype that was there, or that it has when bare."""
        before = self._at(path) or {}
        for name in list(module.variables):
            if name == _PARAMS or not module.is_mutable_collection(name):
                continue
            for key, value in list(module.variables[name].items()):
                if isinstance(value, Mapping) and not isinstance(module._state.children.get(key), str):
                    continue  # a submodule's
                kept = strengthen(value)
                if name not in _ACTIVATIONS:
                    kept = _like(kept, before.get(name, {}).get(key))
                if any(a is not b for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(value), strict=True)):
                    module.put_variable(name, key, kept)

    # --- what is done at the end ---

    def finish(self) -> None:
        if self.make_variables is not None:
            self._restore_params(self.make_variables)
        if not self.prefix and self.modules:
            self._check()

    def _restore_params(self, make_variables: Callable[[], Variables]) -> None:
        """Replaces params that were stored rounded, as ``nn.map_variables`` does, by those of the bare module."""
        if not self.module.is_mutable_collection(_PARAMS):
            return
        params = self.module.scope._mutable_collection(_PARAMS)
        foreseen = dict(_leaves(self.variables[_PARAMS])) if self.variables and _PARAMS in self.variables else {}
        rounded = {}
        for path, leaf in _leaves(params):
            owner = next((path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in self.decisions), None)
            wanted = self.decisions[owner].param_dtype if owner is not None else leaf.dtype
            narrow = _tree.is_float_array(leaf) and leaf.dtype.itemsize < wanted.itemsize
            if narrow and getattr(foreseen.get(path), "dtype", None) != leaf.dtype:
                rounded[path] = wanted
        if rounded:
            exact = dict(_leaves(make_variables()[_PARAMS]))
            for path, wanted in rounded.items():
                _descend(params, path[:-1])[path[-1]] = _tree.cast(exact[path], wanted)

    def _check(self) -> None:
        """Raises if a pattern matched nothing, or a half policy changed no product."""
        variables = {name: nn.unbox(collection) for name, collection in self.module.variables.items()}
        paths = [path for collection in variables.values() for path, _ in _leaves(collection)]
        owners = {path[:-1] for path, _ in _leaves(variables.get(_PARAMS, {}))}
        owners = {path for path in owners if not any(path[: len(nested)] == nested for nested in self.nested)}
        self.policies.check(self.modules, paths, complete=owners <= self.modules.keys())
        half = self.policies.root.compute_dtype
        if not is_half(half) or self.nested or not self.products or not owners <= self.called:
            return
        if all(decision.kept is not None for decision in self.products.values()):
            shown = [f"{'/'.join(p) or type(self.module).__name__} ({d.kept})" for p, d in self.products.items()]
            raise ValueError(
                f"the policy computes in {half.name}, but every product stays as it was: {', '.join(shown[:8])}"
                f"{', …' if len(shown) > 8 else ''}; to overrule a dtype that a module was given, name the module in "
                f"overrides, e.g. overrides={{'**': '{self.policies.root}'}}"
            )


def _push(scope: Any, module: Any, name: Any = None, *args: Any, **kwargs: Any) -> Scope:
    """``scope.push`` that decides for the submodule whose scope it makes, before anyone reads its fields or flags."""
    made = Scope.push(scope(), name, *args, **kwargs)
    parent = module()
    child = parent._state.children.get(made.name) if parent is not None else None
    run = _running.run_of(parent) if isinstance(child, nn.Module) and not hasattr(child, "jaxmp_root") else None
    if run is not None and isinstance(child, nn.Module):
        run.decide(child, made)
    return made


def _cast(tree: Any, policy: Policy) -> Any:
    return policy.cast_to_compute(tree)


def _follow(tree: Any, policy: Policy) -> Any:
    # In a module with params and submodules an input, or what a submodule returns, may meet a param or go on to a
    # float32 submodule. Weakly typed it keeps its digits, and takes the dtype of the first param it meets.
    return weaken(tree)


@functools.cache
def _asks_for_params(cls: Any) -> bool:
    """Whether a method of ``cls`` mentions ``param``: a param that is a dict looks like a submodule's."""
    own = [base for base in cls.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    codes = [
        inspect.unwrap(value).__code__ for base in own for value in vars(base).values() if inspect.isfunction(value)
    ]
    while codes:
        code = codes.pop()
        if "param" in code.co_names:
            return True
        codes += [const for const in code.co_consts if inspect.iscode(const)]
    return False


def _is_floating(dtype: Any) -> bool:
    """Whether ``dtype`` is what a policy may replace: a floating dtype, or None for "infer it"."""
    try:
        return dtype is None or bool(jnp.issubdtype(np.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def _is_default(dtype: Any, default: Any) -> bool:
    if dtype is None or default is None or default is dataclasses.MISSING:
        return dtype is None
    return np.dtype(dtype) == np.dtype(default)


def _hand_out_params(module: nn.Module, policy: Policy, store: bool) -> None:
    """Makes ``module.param`` return params in the compute dtype; with ``store`` it creates them in the param dtype."""
    make: Any = type(module).param
    reference = weakref.ref(module)  # a cycle would keep tracers alive

    def param(name: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if store:
            init_fn = _then(policy.cast_to_param, init_fn)
        return policy.cast_to_compute(make(reference(), name, init_fn, *args, **kwargs))

    object.__setattr__(module, "param", param)


def _then(after: Callable[[Any], Any], before: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: after(before(*args, **kwargs))


def _as_carry(result: Any, args: Any) -> Any:
    """The ``result`` of the body of a loop, with the new carry in the dtypes of the old one, ``args[0]``."""
    if not args or not _is_loop_body(sys._getframe(1)):
        return result
    if _same_structure(result, args[0]):
        return jax.tree.map(_like, result, args[0])
    if isinstance(result, tuple) and result and _same_structure(result[0], args[0]):
        return (jax.tree.map(_like, result[0], args[0]), *result[1:])
    return result


def _is_loop_body(frame: Any) -> bool:
    """Whether it is a lifted loop that calls the method that runs, and not another method of a module."""
    methods = 0
    while frame is not None and methods < 2:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        methods += code is nn.Module._call_wrapped_method.__code__
        if module == "flax.core.axes_scan" or (module == "flax.core.lift" and code.co_name == "body_wrapper"):
            return True
        frame = frame.f_back
    return False


def _like(new: Any, old: Any) -> Any:
    """``new`` with its floating leaves in the dtypes of those of ``old``; without an old one, at least in float32."""
    if not _same_structure(new, old):
        return _tree.widen(new)

    def leaf_like(leaf: Any, known: Any) -> Any:
        dtype = jnp.result_type(known) if hasattr(known, "dtype") else None
        return _tree.cast(leaf, dtype) if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else leaf

    return jax.tree.map(leaf_like, new, old)


def _same_structure(tree: Any, other: Any) -> bool:
    structure: Callable[[Any], Any] = jax.tree.structure
    return bool(structure(tree) == structure(other))


def _shapes(tree: Any) -> Any:
    def shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf

    return jax.tree.map(shape, tree)


def _leaves(collection: Any) -> Iterator[tuple[Path, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(collection):
        yield tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path), leaf


def _descend(collection: Any, path: Path) -> Any:
    for name in path:
        collection = collection.get(name) if isinstance(collection, Mapping) else None
    return collection


def _own(collection: Variables) -> list[Any]:
    return jax.tree.leaves([value for value in collection.values() if not isinstance(value, Mapping)])


def _children(collection: Any) -> bool:
    return isinstance(collection, Mapping) and any(isinstance(value, Mapping) for value in collection.values())
