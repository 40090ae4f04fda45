"""Policies for Flax Linen modules that nobody edited.

:func:`apply_policy` returns the module as an instance of a subclass that differs in one thing: while one of its methods
runs, a method interceptor stands between Linen and every submodule. Before a submodule's first method runs, its ``dtype``
and ``param_dtype`` fields are set as its policy says; a module that has no ``dtype`` field gets its own params, and its
inputs, in the compute dtype. No name changes and no scope is added, so the variables are those of the bare module.

What is set are the fields of the clones that Linen makes for one ``init`` or ``apply``, never those of the user's objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import module as _linen_module

from jaxmp import tree as _tree
from jaxmp._jaxpr.weak import strengthen, weaken
from jaxmp.dtypes import is_half
from jaxmp.patterns import Path, Pattern, pattern_text
from jaxmp.policy import Policy, PolicyMap, get_policy_map

M = TypeVar("M", bound=nn.Module)
_PARAMS = "params"


def apply_policy(module: M, policy: Any, overrides: Mapping[Pattern, Any] | None = None) -> M:
    """``module`` computing under a policy: same fields, same methods, same variables.

    Params are stored in the param dtype, every submodule computes in the compute dtype of its own policy, and what the
    root returns is cast to the output dtype; batch statistics stay float32. A ``dtype`` or ``param_dtype`` field that has
    its class's default is filled; one that differs is the author's word and stays, unless an override covers the module.
    A module without a ``dtype`` field that owns params gets them in the compute dtype; its inputs are cast where they meet
    those params. The carry of a scanned module, or of an RNN cell inside ``nn.RNN``, keeps the dtype it comes in with.

    Args:
      module: any Linen module, alone or to be nested in another; an object that has a policy already gets the new one.
      policy: whatever :func:`jaxmp.get_policy` reads.
      overrides: pattern to policy for parts of the module, see :class:`jaxmp.PolicyMap`.

    Raises (when the module runs, for only then its submodules exist):
      ValueError: a pattern matched no module and no variable; or a half policy under which every product stays float32.

    >>> model = apply_policy(nn.Dense(2), "mixed_float16")
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((1, 3))).dtype
    (dtype('float32'), dtype('float32'))
    >>> products = jax.make_jaxpr(model.apply)(variables, jnp.ones((1, 3)))
    >>> [eqn.outvars[0].aval.dtype for eqn in products.eqns if eqn.primitive.name == "dot_general"]
    [dtype('float16')]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"jaxmp.linen.apply_policy takes an instance of flax.linen.Module, got {module!r}; make the instance first "
            "(Model(...)), and for an NNX module use jaxmp.nnx"
        )
    return _with_root(module, _Root(get_policy_map(policy, overrides)), parent=module.scope, name=module.name)


@dataclasses.dataclass(frozen=True)
class _Root:
    """What a module under a policy knows: the policies, and its own path if it was reached through a bound parent."""

    policies: PolicyMap
    prefix: Path = ()

    def __repr__(self) -> str:
        return str(self.policies)


class _Policied:
    """Mixed into the class of a module under a policy. Starts a run when a method of the module is called from outside."""

    jaxmp_root: _Root

    def _call_wrapped_method(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Every method of a Linen module comes through here, also `BaseClass.method` handed to `apply`.
        if self.scope is None or any(run.is_root(self) for run in _runs.stack):
            return super()._call_wrapped_method(fun, args, kwargs)
        with _running(self, _structure(self, fun, args, kwargs)):
            return super()._call_wrapped_method(fun, args, kwargs)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().apply(variables, *args, **kwargs)
        output_dtype = self.jaxmp_root.policies.resolve(self.jaxmp_root.prefix, {(): type(self)})[0].output_dtype
        if isinstance(result, tuple) and kwargs.get("mutable", False) is not False:
            return _tree.cast(result[0], output_dtype), _keep_dtypes(variables, result[1])
        return _tree.cast(result, output_dtype)

    def clone(self, **kwargs: Any) -> Any:
        with _runs.without_views():
            return super().clone(**kwargs)

    # `model.bind(variables).encoder(x)` reaches a submodule with no method of the root running: what is handed out then is
    # the submodule under the same policies.
    def __getattribute__(self, name: str) -> Any:
        return _view(self, name, super().__getattribute__(name))

    def __getattr__(self, name: str) -> Any:
        return _view(self, name, super().__getattr__(name))

    def __reduce__(self) -> Any:
        return _rebuild, (_base(type(self)), _fields(self), self.jaxmp_root)


@functools.cache
def _policied_class(base: type[nn.Module], root: _Root) -> type[nn.Module]:
    # The root is the class's and not a field: lifted transforms hand the fields of one class to the constructor of another.
    class Policied(_Policied, base):  # type: ignore[misc, valid-type]
        jaxmp_root = root

    # Linen names submodules after their class: the name must not change.
    Policied.__name__, Policied.__qualname__, Policied.__module__ = base.__name__, base.__qualname__, base.__module__
    Policied.__doc__ = base.__doc__
    return Policied


def _base(cls: type[nn.Module]) -> type[nn.Module]:
    return cls.__mro__[2] if issubclass(cls, _Policied) else cls


def _fields(module: nn.Module) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(module) if field.init]
    with _runs.without_views():
        return {name: getattr(module, name) for name in names if name not in ("parent", "name")}


def _with_root(module: Any, root: _Root, **kwargs: Any) -> Any:
    return _policied_class(_base(type(module)), root)(**_fields(module), **kwargs)


def _rebuild(base: type[nn.Module], fields: dict[str, Any], root: _Root) -> nn.Module:
    return _policied_class(base, root)(**fields, parent=None)


def _view(parent: Any, name: str, value: Any) -> Any:
    if not isinstance(value, (nn.Module, list, tuple, Mapping)) or name.startswith("_") or name == "parent":
        return value
    if parent.scope is None or _runs.stack or not _runs.views:
        return value

    def view(child: Any) -> Any:
        if not isinstance(child, nn.Module) or isinstance(child, _Policied) or child.scope is None:
            return child
        prefix = parent.jaxmp_root.prefix + child.path[len(parent.path) :]
        root = dataclasses.replace(parent.jaxmp_root, prefix=prefix)
        return _with_root(child, root, parent=child.scope.rewound(), name=child.name)

    return jax.tree.map(view, value, is_leaf=lambda leaf: isinstance(leaf, nn.Module))


def _keep_dtypes(given: Any, updated: Any) -> Any:
    """``updated`` variables in the dtypes of those ``given``: statistics stay float32 whatever they were computed from."""
    dtypes = {_tree.path_name(path): jnp.result_type(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(given)}

    def keep(path: Any, leaf: Any) -> Any:
        return _tree.cast(leaf, dtypes.get(_tree.path_name(path), getattr(leaf, "dtype", None)))

    return jax.tree_util.tree_map_with_path(keep, updated)


# --- one run: from the call of a root's method to its return ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Decision:
    """How one module computes: its policy, what its inputs become, and (for a product) why it is not in half."""

    policy: Policy
    cast: Callable[[Any, Policy], Any] | None
    kept: str | None


@dataclasses.dataclass(frozen=True)
class _Frame:
    """A method that is running; in a weak one, what comes in from outside is weakly typed (see :func:`_weaken`)."""

    module: nn.Module
    weak: bool


class _Run:
    """The modules met while a method of a root runs, and what was decided for each."""

    def __init__(self, root: Any, structure: Any) -> None:
        self.root, self.path, self.structure = root, root.path, structure
        self.policies, self.prefix = root.jaxmp_root.policies, root.jaxmp_root.prefix
        self.modules: dict[Path, type] = {}
        self.products: dict[Path, _Decision] = {}
        self.nested: set[Path] = set()
        self.frames: list[_Frame] = []
        self.ambient_precision = jax.config.jax_default_matmul_precision

    def is_root(self, module: Any) -> bool:
        return module.path == self.path and _base(type(module)) is _base(type(self.root))

    def covers(self, path: Path) -> bool:
        return path[: len(self.path)] == self.path

    def variables_of(self, module: nn.Module, path: Path) -> Mapping[str, Any] | None:
        """The collections at ``module``, or None where they do not exist yet and could not be foreseen."""
        if not module.is_initializing():
            return module.variables
        if self.structure is None:
            return None
        at = {name: _descend(collection, path) for name, collection in self.structure.items()}
        return {name: collection for name, collection in at.items() if collection is not None}

    def decide(self, module: nn.Module) -> _Decision:
        """Sets ``module`` up for its policy, once, and remembers what was decided."""
        path = module.path[len(self.path) :]
        self.modules.setdefault(path, type(module))
        decision = vars(module).get("_jaxmp_decision")
        if decision is None:
            decision = self._decide(module, path)
            object.__setattr__(module, "_jaxmp_decision", decision)
        variables = self.variables_of(module, path)
        if variables is not None and any(jnp.ndim(leaf) >= 2 for leaf in _own(variables.get(_PARAMS, {}))):
            self.products[path] = decision
        return decision

    def _decide(self, module: nn.Module, path: Path) -> _Decision:
        policy, pattern = self.policies.resolve(self.prefix + path, self._classes())
        fields = {field.name: field.default for field in dataclasses.fields(module)}
        variables = self.variables_of(module, path)
        owns_params = variables is None or bool(_own(variables.get(_PARAMS, {})))
        has_children = variables is not None and any(_children(value) for value in variables.values())

        if "param_dtype" in fields and (pattern is not None or module.param_dtype == fields["param_dtype"]):
            object.__setattr__(module, "param_dtype", policy.param_dtype)
        # A container's None is left alone: what lies below follows its own path.
        container = has_children and not owns_params
        dtype, has_dtype = getattr(module, "dtype", None), "dtype" in fields
        if has_dtype and not (dtype is None and container):
            if pattern is not None or dtype is None or dtype == fields["dtype"]:
                object.__setattr__(module, "dtype", policy.compute_dtype)
            computes = jnp.dtype(module.dtype)
            if is_half(computes):
                return _Decision(policy, None, None)
            kept = f"override {pattern_text(pattern)!r}" if pattern is not None else f"its own dtype={computes.name}"
            return _Decision(policy, None, kept)

        _hand_out_params(module, policy, store="param_dtype" not in fields)
        kept = None if is_half(policy.compute_dtype) else f"override {pattern_text(pattern or '**')!r}"
        if owns_params and has_children:
            return _Decision(policy, _weaken, kept)
        return _Decision(policy, _cast if owns_params or (pattern and not has_children) else None, kept)

    def _classes(self) -> Mapping[Path, type]:
        return {self.prefix + path: cls for path, cls in self.modules.items()}

    def finish(self) -> None:
        """Raises if a pattern matched nothing, or a half policy changed no product."""
        if self.prefix or not self.modules:
            return
        leaves = jax.tree_util.tree_leaves_with_path(nn.unbox(self.root.variables))
        variables = [tuple(_tree.path_name(path).split("/")) for path, _ in leaves]
        owners = {path[1:-1] for path in variables if path[0] == _PARAMS}
        complete = all(
            path in self.modules or any(path[: len(root)] == root for root in self.nested) for path in owners
        )
        self.policies.check(self.modules, [path[1:] for path in variables], complete)
        half = self.policies.root.compute_dtype
        if complete and is_half(half) and self.products and all(d.kept is not None for d in self.products.values()):
            shown = [f"{'/'.join(p) or type(self.root).__name__} ({d.kept})" for p, d in self.products.items()]
            raise ValueError(
                f"the policy computes in {half.name}, but every product stays as it was: {', '.join(shown[:8])}"
                f"{', …' if len(shown) > 8 else ''}; to overrule a dtype that a module was given, name the module in "
                f"overrides, e.g. overrides={{'**': '{self.policies}'}}"
            )


class _Runs(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Run] = []
        self.views = True
        self.intercepting = False

    @contextlib.contextmanager
    def without_views(self) -> Iterator[None]:
        before, self.views = self.views, False
        try:
            yield
        finally:
            self.views = before


_runs = _Runs()


@contextlib.contextmanager
def _running(root: Any, structure: Any) -> Iterator[None]:
    run = _Run(root, structure)
    for outer in _runs.stack:
        if outer.covers(root.path):
            outer.nested.add(root.path[len(outer.path) :])
            outer.modules.setdefault(root.path[len(outer.path) :], type(root))
    first, _runs.intercepting = not _runs.intercepting, True
    _runs.stack.append(run)
    try:
        with nn.intercept_methods(_intercept) if first else contextlib.nullcontext():
            yield
        run.finish()
    finally:
        _runs.stack.remove(run)
        _runs.intercepting = not first


def _intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """Stands between Linen and every method of every module while a root runs."""
    module = context.module
    run = next((run for run in reversed(_runs.stack) if module.scope is not None and run.covers(module.path)), None)
    if run is None:
        return next_fun(*args, **kwargs)
    decision = run.decide(module)
    if context.method_name == "setup":
        return next_fun(*args, **kwargs)

    caller = run.frames[-1] if run.frames else None
    inside = caller is not None and caller.module.path == module.path  # a helper method, or a lifted transform's body
    policy, inputs, weak = decision.policy, (args, kwargs), caller is not None and caller.weak
    if not inside:
        inputs = strengthen(inputs) if weak else inputs
        inputs = decision.cast(inputs, policy) if decision.cast else inputs
    run.frames.append(_Frame(module, decision.cast is _weaken))
    try:
        with jax.default_matmul_precision(policy.matmul_precision or run.ambient_precision):
            result = next_fun(*inputs[0], **inputs[1])
    finally:
        run.frames.pop()

    if caller is not None and _is_scanned(module, caller.module):
        carry, *outputs = result
        result = (jax.tree.map(_tree.cast, carry, jax.tree.map(jnp.result_type, args[0])), *outputs)
    if not inside and (weak or decision.cast is _weaken):
        result = weaken(result) if weak else strengthen(result)
    if caller is None and run.is_root(module) and not run.prefix:
        result = policy.cast_to_output(result)
    return result


def _cast(tree: Any, policy: Policy) -> Any:
    return policy.cast_to_compute(tree)


def _weaken(tree: Any, policy: Policy) -> Any:
    # In a module with params and submodules an input, or what a submodule returns, may meet a param or go on to a float32
    # submodule. Weakly typed it keeps its digits, and takes the dtype of the first param it meets.
    return weaken(tree)


def _is_scanned(module: nn.Module, caller: nn.Module) -> bool:
    """Whether ``module`` is the body of the ``nn.scan`` class that calls it, or the cell of an ``nn.RNN``."""
    if isinstance(module, nn.RNNCellBase) and isinstance(caller, nn.RNN):
        return True
    return caller.path == module.path and type(caller).__name__ == f"Scan{type(module).__name__}"


def _hand_out_params(module: nn.Module, policy: Policy, store: bool) -> None:
    """Makes ``module.param`` return params in the compute dtype; with ``store`` it creates them in the param dtype."""

    def param(name: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if store:
            init_fn = _then(policy.cast_to_param, init_fn)
        return policy.cast_to_compute(type(module).param(module, name, init_fn, *args, **kwargs))

    object.__setattr__(module, "param", param)


def _then(after: Callable[[Any], Any], before: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: after(before(*args, **kwargs))


def _structure(root: Any, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The shapes of the variables that ``init`` is about to make; None when not initialising, or if they can't be foreseen.

    Which modules own params and which have submodules decides how each is treated, and at ``init`` only a trial run tells.
    """
    if not root.is_initializing() or fun.__name__ == "setup":
        return None
    unbound, _ = root.unbind()
    bare = _base(type(root))(**_fields(unbound), parent=None)
    rngs = {name: jax.random.key(0) for name in root.scope.rngs}
    context = _linen_module._context
    table, context.call_info_stack = context.call_info_stack, []  # `tabulate` must not list the trial's calls
    runs, _runs.stack = _runs.stack, []
    try:
        return jax.eval_shape(lambda: bare.init(rngs, *args, method=fun.__name__, **kwargs))
    except (
        Exception
    ):  # the user's own error, which the real run will raise, or a module shared with one outside the root
        return None
    finally:
        context.call_info_stack, _runs.stack = table, runs


def _descend(collection: Any, path: Path) -> Any:
    for name in path:
        collection = collection.get(name) if isinstance(collection, Mapping) else None
    return collection


def _own(collection: Mapping[str, Any]) -> list[Any]:
    return jax.tree.leaves([value for value in collection.values() if not isinstance(value, Mapping)])


def _children(collection: Any) -> bool:
    return isinstance(collection, Mapping) and any(isinstance(value, Mapping) for value in collection.values())
