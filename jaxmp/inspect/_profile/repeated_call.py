"""A call that can be repeated, although it donates its arguments or changes its models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp.base.donation import is_deleted
from jaxmp.inspect.program.calls import is_step, named, step_call

_NOTABLE_COPY = 2**20
"""The bytes of NumPy arrays from which their copy to the device may take a notable time."""


class RepeatedCall:
    """The call ``fun(*args)``, on copies of the arguments.

    A donated argument is replaced by the result that has its structure: the new state of a step. An iterator among the
    arguments is a source of batches, from which each call draws the next one.

    Attributes:
      fun: the function: for a step of an NNX model, the same step as a function of a train state.
      run: the function that a call runs: ``fun``, or the same program with other options of the compiler.
      args: the arguments of the next call.
      seconds_to_draw: the seconds that all calls took to draw batches.

    Raises:
      TypeError: an argument is donated, and no result can replace it; or an argument is a loader of batches that is
        not an iterator.
    """

    def __init__(self, fun: Callable[..., Any], args: Sequence[Any]) -> None:
        self.seconds_to_draw = 0.0
        _refuse_loaders(args)
        self._iterators = {number: arg for number, arg in enumerate(args) if isinstance(arg, Iterator)}
        args = [self._draw(number, arg) for number, arg in enumerate(args)]
        if is_step(fun):
            batches = self._iterators.get(len(args) - 1)
            call = step_call(fun, args)
            fun, args = call.step, [call.state, call.batch]
            self._iterators = {} if batches is None else {1: batches}
        self.fun = self.run = fun
        self.args = _copied(args)
        self._is_first = True

    def __call__(self) -> Any:
        """Run the call once, and return its result without waiting for the device."""
        if not self._is_first:  # the first batches were drawn with the arguments
            self.args = [self._draw(number, arg) for number, arg in enumerate(self.args)]
        self._is_first = False
        result = self.run(*self.args)
        self.args = _replace_donated(self.args, result)
        return result

    @property
    def is_python(self) -> bool:
        """Return whether the function is a Python function, which runs without ``jax.jit``."""
        return not is_step(self.fun) and not hasattr(self.fun, "trace")

    @property
    def copied(self) -> list[int]:
        """Return the numbers of the arguments with large NumPy arrays, which each call copies to the device."""
        sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(arg) if isinstance(leaf, np.ndarray)) for arg in self.args]
        return [number for number, size in enumerate(sizes) if size >= _NOTABLE_COPY]

    def wait(self, result: Any) -> None:
        """Wait for the result of the last call, and for the models that it changed."""
        jax.block_until_ready(jax.tree.map(_arrays_of, (result, self.args), is_leaf=_is_nnx))

    def _draw(self, number: int, arg: Any) -> Any:
        if number not in self._iterators:
            return arg
        started = time.perf_counter()
        try:
            batch = next(self._iterators[number])
        except StopIteration:
            raise ValueError(
                f"argument {number} is an iterator that ended before all calls were measured; pass an iterator without "
                "end, such as itertools.cycle(batches)"
            ) from None
        self.seconds_to_draw += time.perf_counter() - started
        return batch


def _refuse_loaders(args: Sequence[Any]) -> None:
    """Raise a TypeError for a loader of batches, as of torch or grain, that was passed without ``iter``."""
    for number, arg in enumerate(args):
        is_iterable = hasattr(arg, "__iter__") and not hasattr(arg, "shape") and not isinstance(arg, (str, Iterator))
        if is_iterable and jax.tree_util.all_leaves([arg]):
            raise TypeError(
                f"argument {number} is a {type(arg).__name__}, not a batch; write iter(...) around it, and each call "
                "draws the next batch"
            )


def _copied(args: Sequence[Any]) -> list[Any]:
    """Copy the arrays of the arguments, and the NNX models in them."""
    models = [node for node in jax.tree.leaves(args, is_leaf=_is_nnx) if _is_nnx(node)]
    if models:  # together, because arguments may share a model
        graphdef, state = nnx.split(models, graph=True)
        models = named(nnx.merge(graphdef, jax.tree.map(_copied_array, state)))
    copies = iter(models)
    return [
        jax.tree.map(lambda leaf: next(copies) if _is_nnx(leaf) else _copied_array(leaf), arg, is_leaf=_is_nnx)
        for arg in args
    ]


def _is_nnx(node: Any) -> bool:
    return isinstance(node, nnx.Pytree)


def _arrays_of(leaf: Any) -> Any:
    return nnx.as_pure(nnx.state(leaf)) if _is_nnx(leaf) else leaf


def _copied_array(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _replace_donated(args: Sequence[Any], result: Any) -> list[Any]:
    """Return the arguments of the next call.

    A result can replace an argument if it has the same structure, shapes and dtypes. The results are the value that the
    function returned, and its elements if it is a tuple.
    """
    results = [*result, result] if isinstance(result, (tuple, list)) else [result]
    next_args = []
    for number, arg in enumerate(args):
        if not is_deleted(arg):
            next_args.append(arg)
            continue
        place = next((place for place, part in enumerate(results) if _form(part) == _form(arg)), None)
        if place is None:
            raise TypeError(
                f"argument {number} is donated, and the function returns no value of its structure, so the call cannot "
                "be repeated; profile the function without donation"
            )
        next_args.append(results.pop(place))  # a second argument of this structure gets the next result
    return next_args


def _form(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]
