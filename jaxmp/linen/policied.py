"""Policies for Flax Linen modules, without changes to their code.

:func:`apply_policy` returns an instance of a subclass of the module's class. The subclass only adds the policy, and a
hook: if code outside of the model calls a method, ``jaxmp.engine`` rewrites the program of this call (``_run_model``).
``jaxmp/linen/run.py`` handles the calls of the modules inside, and README.md follows one call from start to end. Names
and scopes do not change, so the variables are those of the original module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import decorator_lift_transform

from jaxmp._internals.flax.linen import Hooks, is_checked
from jaxmp.base.arguments import require_no_policy, require_order
from jaxmp.base.cache_keys import policies_off
from jaxmp.base.donation import require_not_deleted
from jaxmp.base.dtypes import AsComputed
from jaxmp.engine.model_call import ModelCall
from jaxmp.engine.model_policy import ModelPolicy, require_no_operations, wrong_model
from jaxmp.linen.run import author_fields, current_run, start_run
from jaxmp.linen.scopes import ACTIVATIONS, PARAMS, PoliciedModel, add_model, without_models

M = TypeVar("M", bound=nn.Module)


def apply_policy(module: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """Return ``module`` under a policy, with the same fields, methods and variables.

    A call of the model computes what :func:`jaxmp.autocast` of this call computes: products are half precision, and the
    rules of docs/autocast.md decide every other operation. Params are initialised in float32 and stored in the param
    dtype. The result is cast to the output dtype. Gradients of params are summed in float32. If your own code casts a
    param to half, JAX sums its gradient in half.

    A module whose author set a ``dtype`` is computed as Flax defines for this dtype. The author has set it if its value
    differs from the default of the field. A ``param_dtype`` that the author set is kept, too. An override that matches
    the module wins over both.

    While JAX traces the model, its code sees float32, as under autocast. So Python code that reads ``x.dtype`` sees
    float32, and cannot branch on values of arrays. Call ``apply`` under ``jax.jit``, because without it the model is
    traced again in every call.

    Caches are stored in the compute dtype. The collections ``intermediates`` and ``perturbations`` have the dtypes in
    which their values are computed. Batch statistics and all other collections keep their dtypes.

    Args:
      module: any Linen module, which you may also nest in another. A submodule that already has a policy keeps it.
      policy: anything that :func:`jaxmp.get_policy` takes.
      overrides: a mapping from key to level. Keys for modules are the patterns of :class:`jaxmp.PolicyMap`. A path may
        begin with the name of ``module``, or with its class if it has no name, so ``Net/head`` means ``head``. The
        paths that :mod:`jaxmp.inspect` prints begin with this name. Keys for operations are those of
        :func:`jaxmp.autocast`, such as ``"primitive:exp"`` or ``"head:dot_general"``. The levels are:

        - ``"float32"`` and ``"tensorfloat32"``;
        - ``"half"``: all operations of the module are half, except linear algebra;
        - a policy: the rules decide for each operation of the module;
        - ``"written"``: the code of the module runs as it is written, in the compute dtype. A module with a ``dtype``
          field gets this dtype. Any other module gets its arguments and params in this dtype. Use it for kernels of
          your own.

    Raises:
      TypeError: ``module`` is not an instance of a Linen module.
      ValueError: ``module`` has a policy already; an override of an operation has an unknown level, primitive or class.
        These errors are raised when the module runs, because its submodules do not exist earlier: a pattern matched no
        module; or an ``nnx.bridge.ToLinen`` wraps a class without a policy. These are raised in a call that runs all
        modules: an override matched no operation; or the half policy has no effect, because overrides or dtypes keep
        every product in float32. An override that matches nothing raises an :class:`jaxmp.UnmatchedOverrideError`.

    >>> model = apply_policy(nn.Dense(8), "mixed_float16")
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 8)))
    >>> variables["params"]["kernel"].dtype, model.apply(variables, jnp.ones((1, 8))).dtype
    (dtype('float32'), dtype('float32'))
    >>> products = jax.make_jaxpr(model.apply)(variables, jnp.ones((1, 8)))
    >>> [eqn.outvars[0].aval.dtype for eqn in products.eqns if eqn.primitive.name == "dot_general"]
    [dtype('float16')]
    """
    return _apply(module, policy, overrides, "apply_policy")


def autocast(module: M, policy: Any, overrides: Mapping[Any, Any] | None = None) -> M:
    """Return ``module`` under a policy that casts neither params nor results.

    A call computes as under :func:`apply_policy`. Params keep the dtypes of their initializers. The result has the
    dtype of the traced code, which is float32 in general. The arguments and the errors are those of
    :func:`apply_policy`. Autocast also reaches modules inside of ``nnx.bridge``.

    >>> model = autocast(nn.Dense(2), "mixed_bfloat16")
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 8)))
    >>> model.apply(variables, jnp.ones((1, 8))).dtype
    dtype('float32')
    """
    return _apply(module, policy, overrides, "autocast")


def _apply(module: M, policy: Any, overrides: Mapping[Any, Any] | None, function: str) -> M:
    """Return ``module`` under a policy.

    ``function`` is the name of the public function that the user called.
    """
    require_order(module, policy, f"jaxmp.linen.{function}")
    if not isinstance(module, nn.Module):
        raise wrong_model(module, "linen", function)
    require_no_policy(module, isinstance(module, _PolicyHooks), f"jaxmp.linen.{function}")
    model_policy = ModelPolicy.create(policy, overrides, stores=function == "apply_policy")
    model_policy = model_policy.in_scope(module.name or type(module).__name__)
    scope = without_models(module.scope) if module.scope else None
    return cast(M, _rebuild(_bare_class(type(module)), author_fields(module), model_policy, module.name, scope))


class _PolicyHooks(Hooks):
    """A mixin for the class of a model under a policy."""

    jaxmp_policy: ModelPolicy

    def jaxmp_register(self) -> None:
        if self.scope is not None and not is_checked(self):
            add_model(self.scope, PoliciedModel(self.jaxmp_policy, self.path))

    def jaxmp_call(
        self, call: Callable[[], Any], method: Callable[..., Any], args: Any, kwargs: Any, name: str | None
    ) -> Any:
        """Return ``call()``, the call of ``method``; a call from outside of the model runs under its policy."""
        if policies_off.value or self.scope is None or is_checked(self) or name == "setup":
            return call()
        run, model = current_run(), PoliciedModel(self.jaxmp_policy, self.path)
        add_model(self.scope, model)
        if run is not None and model in run.active:
            return call()
        if run is None:
            result = _run_model(self, model, method, args, kwargs, name)
        else:  # a model inside of another
            require_no_operations(self.jaxmp_policy, self)
            with run.enter(model):
                result = call()
                run.check_patterns(model, self)
        return self.jaxmp_policy.cast_to_output(result)

    @functools.wraps(nn.Module.apply)
    def apply(
        self,
        variables: Any,
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: Any = False,
        capture_intermediates: Any = False,
        **kwargs: Any,
    ) -> Any:
        require_not_deleted(variables)
        return super().apply(
            variables,
            *args,
            rngs=rngs,
            method=_as_one_run(method),
            mutable=mutable,
            capture_intermediates=capture_intermediates,
            **kwargs,
        )

    @functools.wraps(nn.Module.init_with_output)
    def init_with_output(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return super().init_with_output(*args, method=_as_one_run(method), **kwargs)

    @functools.wraps(nn.Module.tabulate)
    def tabulate(self, *args: Any, **kwargs: Any) -> str:
        return f"{super().tabulate(*args, **kwargs)}policy: {self.jaxmp_policy}\n"

    def __repr__(self) -> str:
        return f"{super().__repr__()}  # policy: {self.jaxmp_policy}"

    def __reduce__(self) -> Any:
        return _rebuild, (_bare_class(type(self)), author_fields(self), self.jaxmp_policy, self.name)


def _run_model(
    module: Any, model: PoliciedModel, method: Callable[..., Any], args: Any, kwargs: Any, name: str | None
) -> Any:
    """Call a method of a model under its policy.

    A call that creates params runs in float32. Every other call is a program that the engine rewrites.
    """
    creates_params = module.is_initializing() or (
        module.is_mutable_collection(PARAMS) and not module.variables.get(PARAMS)
    )
    with start_run() as run, run.enter(model):
        if creates_params:
            result = method(module, *args, **kwargs)
            if name == "__call__":  # another method may not initialise every module
                run.check_patterns(model, module)
            return result
        call = ModelCall(model.policy)
        result = decorator_lift_transform(_rewrite, method, call)(module, *args, **kwargs)
        run.check_patterns(model, module)
        call.check(run.called_all(model, module))
        return result


def _rewrite(fun: Callable[..., Any], call: ModelCall) -> Callable[..., Any]:
    """Return a version of ``fun``, a function of a Linen scope, that computes the program of ``call``."""

    def rewritten(scope_of: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def pure(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            scope = scope_of(variables, rngs)
            result = fun(scope, *args, **kwargs)
            return result, jax.tree.map_with_path(_mark_activation, repack(scope))

        return call.computed(pure, variables, rngs, args, kwargs)

    return lift.pack(rewritten, (True,), (True,), (True,), enable_kwargs=True)


def _mark_activation(path: Any, leaf: Any) -> Any:
    """Mark a variable that keeps the dtype in which it is computed.

    In ``path``, the name of its collection follows two positions.
    """
    return AsComputed(leaf) if path[2].key in ACTIVATIONS else leaf


def _wrap(method: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """Wrap ``method`` so that a call from outside of the model starts a run."""

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
    return method if is_method or hasattr(method, "method_handler_wrapped") else _wrap(method, None)


@functools.cache
def _policied_class(bare: Any, policy: ModelPolicy) -> Any:
    """Return the subclass of ``bare`` for models under ``policy``."""

    # The policy is an attribute of the class and not a field: lifted transforms pass the fields of a module to the
    # constructor of another class.
    class Model(_PolicyHooks, bare):
        jaxmp_policy = policy
        __hash__ = bare.__hash__

    # Linen names submodules after their class, so the class keeps its name.
    Model.__name__, Model.__qualname__, Model.__module__ = bare.__name__, bare.__qualname__, bare.__module__
    Model.__doc__ = bare.__doc__
    for name in dir(bare):
        method = inspect.getattr_static(bare, name)
        if inspect.isfunction(method) and hasattr(method, "method_handler_wrapped"):
            # The run must start before a lifted transform of the method or of the class, because the transform calls
            # the method of another instance. The methods of a subclass, such as the one that qwix makes of the model,
            # are not wrapped here: `Hooks` starts their run.
            setattr(Model, name, _wrap(method, name))
    return Model


def _bare_class(cls: Any) -> Any:
    """Return the class that the author wrote, for a class with or without a policy."""
    return next(base for base in cls.__mro__ if not issubclass(base, Hooks))


def _rebuild(bare: Any, fields: dict[str, Any], policy: ModelPolicy, name: str | None, parent: Any = None) -> Any:
    """Create a module of the class ``bare`` under a policy."""
    return _policied_class(bare, policy)(**fields, name=name, parent=parent)
