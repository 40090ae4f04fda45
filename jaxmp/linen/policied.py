"""Policies for Flax Linen modules, without changes to their code.

:func:`apply_policy` returns an instance of a subclass of the module's class. The returned module is the root. If code
outside of the root calls a method of the root, the method runs under the policies (see ``jaxmp/linen/run.py``). Names
and scopes do not change, so the variables are those of the original module. Dtype fields are set on the clones that
Linen creates for one ``init`` or ``apply``, never on the user's objects.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import flax.linen as nn
from flax.core import Scope, lift
from flax.linen.transforms import decorator_lift_transform

from jaxmp._internals.flax.linen import Hooks, is_checked, unlisted
from jaxmp.base.arguments import require_no_policy, require_order
from jaxmp.base.cache_keys import policies_off
from jaxmp.base.donation import require_not_deleted
from jaxmp.engine.autocast import computed
from jaxmp.engine.half_check import ProductsCheck
from jaxmp.engine.module_border import autocast_map, wrong_model
from jaxmp.linen.fields import replaced_fields
from jaxmp.linen.root import Root
from jaxmp.linen.run import RootRun, run_with_root, running
from jaxmp.linen.variables import Variables
from jaxmp.policy.policy_map import PolicyMap

M = TypeVar("M", bound=nn.Module)


def apply_policy(module: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """Return ``module`` under a policy, with the same fields, methods and variables.

    Params are stored in the param dtype. Every submodule computes in the compute dtype of its policy, and the result
    of ``module`` is cast to the output dtype. The collections ``cache``, ``intermediates`` and ``perturbations`` have
    the dtypes of the computed values. Batch statistics and all other collections keep their dtypes. Initializers that
    JAX cannot run in half precision, such as the orthogonal one, run in float32.

    The policy sets the fields ``dtype`` and ``param_dtype``. A module with a ``dtype`` field, such as ``nn.Dense``,
    then computes as Flax defines for this dtype. A field whose value you changed from its default keeps your value,
    unless an override matches the module. A submodule that already has a policy keeps its policy. Flax's attention
    without a ``dtype`` has half-precision products and a float32 softmax. With ``decode=True``, its softmax is half
    precision too.

    A module without a ``dtype`` field gets half-precision results from its layers. If the module has params of its own,
    it is traced in float32, and the rules of :func:`jaxmp.autocast` decide the dtype of each operation. If the module
    has no params of its own, each operation has the dtype of its inputs, so ``jnp.mean`` of a float16 array returns
    float16.

    Gradients of params are summed in float32. A loop's carry keeps the dtype of its initial value, because jaxmp
    replaces ``jax.lax.scan`` and JAX's other loops while the model is traced. Write ``jax.lax.scan`` in full: a name
    that you import with ``from jax.lax import scan`` is not replaced. The model is traced as under ``jax.jit``, so its
    Python code cannot branch on values of arrays.

    Args:
      module: any Linen module, which you may also nest in another.
      policy: anything that :func:`jaxmp.get_policy` takes.
      overrides: a mapping from pattern to policy for parts of the module, see :class:`jaxmp.PolicyMap`. A path may
        begin with the name of ``module``, or with its class if it has no name, so ``Net/head`` means ``head``. The
        paths that :mod:`jaxmp.inspect` prints begin with this name.

    Raises:
      TypeError: ``module`` is not an instance of a Linen module.
      ValueError: ``module`` has a policy already. These errors are raised when the module runs, because its submodules
        do not exist earlier: a pattern matched no module; an ``nnx.bridge.ToLinen`` wraps a class without a policy; or
        the half policy has no effect, because overrides or dtypes keep every product in float32 (checked in a call that
        runs all modules).

    >>> model = apply_policy(nn.Dense(2), "mixed_float16")
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((1, 3))).dtype
    (dtype('float32'), dtype('float32'))
    >>> products = jax.make_jaxpr(model.apply)(variables, jnp.ones((1, 3)))
    >>> [eqn.outvars[0].aval.dtype for eqn in products.eqns if eqn.primitive.name == "dot_general"]
    [dtype('float16')]
    """
    require_order(module, policy, "jaxmp.linen.apply_policy")
    return _under(module, Root(PolicyMap(policy, overrides)), "apply_policy")


def autocast(module: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """Return ``module`` under :func:`jaxmp.autocast`, with the same variables.

    Autocast decides the dtype of each operation, and no ``dtype`` field changes. Variables are initialised without
    autocast.

    Args:
      module: any Linen module, which you may also nest in another.
      policy: any policy of :func:`jaxmp.get_policy` that computes in float16 or bfloat16.
      overrides: a mapping from pattern to ``"float32"``, to ``"half"``, or to a policy that computes in float32 or in
        the half dtype of ``policy``. Patterns for modules are those of :class:`jaxmp.PolicyMap`. Patterns for
        operations are the keys of :func:`jaxmp.autocast`, such as ``"primitive:exp"``.

    Raises:
      TypeError: ``module`` is not an instance of a Linen module.
      ValueError: ``module`` has a policy already; the policy does not compute in half precision; an override computes
        neither in the policy's half dtype nor in float32; an override names an unknown primitive or class. These errors
        are raised when the module runs: a pattern matched no module; an override matched no operation; or overrides of
        modules, of ``"class:half"`` or of ``"class:*"`` keep every product in float32. (Overrides of primitives, such
        as ``{"primitive:dot_general": "float32"}``, may keep every product in float32.)

    >>> model = autocast(nn.Dense(2), "mixed_bfloat16")
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> model.apply(variables, jnp.ones((1, 3))).dtype
    dtype('float32')
    """
    require_order(module, policy, "jaxmp.linen.autocast")
    policies, operations = autocast_map(policy, overrides)
    return _under(module, Root(policies, autocast=True, operations=tuple(operations.items())), "autocast")


def _under(module: M, root: Root, name: str) -> M:
    """Return ``module`` under the policies of ``root``.

    ``name`` is the name of the public function that the user called, for the error message.
    """
    if not isinstance(module, nn.Module):
        raise wrong_model(module, "linen", name)
    require_no_policy(module, isinstance(module, _Policied), f"jaxmp.linen.{name}")
    root = dataclasses.replace(root, policies=root.policies.below(module.name or type(module).__name__))
    scope = module.scope.rewound() if module.scope else None
    return _with_root(module, root, scope)


class _Policied(Hooks):
    """A mixin for the class of a root.

    A run starts if code outside of the root calls a method of the root (see ``jaxmp/linen/run.py``).
    """

    jaxmp_root: Root

    def jaxmp_call(
        self, call: Callable[[], Any], method: Callable[..., Any], args: Any, kwargs: Any, name: str | None
    ) -> Any:
        """Return ``call()``; start a run if the call comes from outside of the root."""
        if policies_off.value or self.scope is None or is_checked(self):
            return call()
        if (run := run_with_root(self)) is not None:
            run.copy = weakref.ref(self)
            run.decide(self)  # before the submodules get scopes
            return call()
        if name == "setup":  # Linen sets up a bound model, and no other method runs
            return call()
        creates_params = self.is_initializing() or (
            self.is_mutable_collection("params") and not self.variables.get("params")
        )
        bare_variables = _bare_variables(self, method, args, kwargs) if creates_params else None
        check = None
        if not creates_params:
            check = ProductsCheck(self.jaxmp_root.policies.root)
            lifted = functools.partial(_through_engine, self.jaxmp_root, check)
            call = functools.partial(decorator_lift_transform(lifted, method), self, *args, **kwargs)
        with running(RootRun(self, self.jaxmp_root, bare_variables, name)) as run:
            result = run.cast_output(call())
        if check:
            check.ran(run.not_half)
        return result

    def jaxmp_register(self) -> None:
        if not is_checked(self):
            self.jaxmp_root.mark(self)

    @functools.wraps(nn.Module.apply)
    def apply(self, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        require_not_deleted(variables)
        return super().apply(variables, *args, method=_as_one_run(method), **kwargs)

    @functools.wraps(nn.Module.init_with_output)
    def init_with_output(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return super().init_with_output(*args, method=_as_one_run(method), **kwargs)

    def __reduce__(self) -> Any:
        return _rebuild, (_base(type(self)), _author_fields(self), self.jaxmp_root, self.name)


def _through_engine(root: Root, check: ProductsCheck, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of ``fun`` that ``jaxmp.engine`` rewrites.

    ``fun`` is a function of a Linen scope.
    """

    def run(scope_of: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def pure(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            scope = scope_of(variables, rngs)
            return fun(scope, *args, **kwargs), repack(scope)

        return computed(pure, root.rules(check.decided), (variables, rngs, args, kwargs), {})

    return lift.pack(run, (True,), (True,), (True,), enable_kwargs=True)


# Linen wraps each method in a function with this code. A method with a lifted transform has another wrapper, and so
# does each method of a transformed class.
_WRAPPER = nn.Dense.__call__.__code__


def _entrance(method: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """Wrap ``method`` so that a call from outside of the root starts a run."""

    @functools.wraps(method)
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.jaxmp_call(functools.partial(method, self, *args, **kwargs), method, args, kwargs, name)

    return enter


def _as_one_run(method: Any) -> Any:
    """Wrap the argument ``method`` of ``apply`` if it is a plain function.

    The function may call several methods of the module, and all of these calls then belong to one run. A method or the
    name of a method is returned unchanged.
    """
    is_method = method is None or isinstance(method, str) or inspect.ismethod(method)
    return method if is_method or hasattr(method, "method_handler_wrapped") else _entrance(method, None)


@functools.cache
def _policied_class(base: Any, root: Root) -> Any:
    """Return the subclass of ``base`` under the policies of ``root``."""

    # The root is an attribute of the class and not a field: lifted transforms pass the fields of a module to the
    # constructor of another class.
    class Policied(_Policied, base):
        jaxmp_root = root
        __hash__ = base.__hash__

    # Linen names submodules after their class, so the class keeps its name.
    Policied.__name__, Policied.__qualname__, Policied.__module__ = base.__name__, base.__qualname__, base.__module__
    Policied.__doc__ = base.__doc__
    for name in dir(base):
        method = inspect.getattr_static(base, name)
        wrapped = inspect.isfunction(method) and hasattr(method, "method_handler_wrapped")
        if wrapped and method.__code__ is not _WRAPPER:
            setattr(Policied, name, _entrance(method, name))
    return Policied


def _base(cls: Any) -> Any:
    """Return the class that the author wrote, for a class with or without a policy."""
    return next(base for base in cls.__mro__ if not issubclass(base, Hooks))


def _author_fields(module: Any) -> dict[str, Any]:
    """Return the fields of a module with the values that the author set."""
    names = [field.name for field in dataclasses.fields(module) if field.init]
    fields = {name: getattr(module, name) for name in names if name not in ("parent", "name")}
    return {**fields, **replaced_fields(module)}


def _rebuild(base: Any, fields: dict[str, Any], root: Root, name: str | None, parent: Scope | None = None) -> Any:
    """Create a module of the class ``base``, under the policies of ``root``."""
    return _policied_class(base, root)(**fields, name=name, parent=parent)


def _with_root(module: Any, root: Root, parent: Scope | None) -> Any:
    """Return a copy of ``module`` under the policies of ``root``."""
    return _rebuild(_base(type(module)), _author_fields(module), root, module.name, parent)


def _bare_variables(module: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], Variables]:
    """Return a function that initialises the variables without policies.

    The variables have the same initial values as in the run, because the function uses the path and the rngs of the
    module's scope.
    """
    scope = module.scope
    fields = _author_fields(module.clone(_deep_clone=True, _reset_names=True, name=None))  # the run changes the fields

    def make() -> Variables:
        bare = Scope({}, rngs=scope.rngs, mutable=scope.mutable, path=scope.path, flags={"initializing": True})
        with unlisted():
            method(_base(type(module))(**fields, parent=bare), *args, **kwargs)
        return bare.variables()

    return make
