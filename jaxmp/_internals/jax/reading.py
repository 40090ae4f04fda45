"""Reading equations: what each version of JAX keeps elsewhere or under another name."""

from __future__ import annotations

import collections
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src import config, core, source_info_util
from jax._src.interpreters.batching import BatchTrace
from jax.extend.core import Literal as Literal

Names = tuple[str, ...]
Opened = tuple[Any, list[Any]]
"""An open jaxpr and its constants."""


RESHARDS = frozenset({"reshard", "mesh_cast"})
"""Primitives that change an array's sharding type and no number."""


class Bodies(NamedTuple):
    """The jaxprs in an equation and how their values meet those outside.

    ``kind`` is ``"call"`` (operands and results are those of the one body), ``"scan"``, ``"while"`` (condition, body)
    or ``"cond"`` (the branches). The operands of a loop are ``consts`` of its condition, if it has one, those of its
    body up to ``start``, ``carry`` carried values, and what a scan runs over.
    """

    kind: str
    jaxprs: tuple[Any, ...]
    consts: int = 0
    start: int = 0
    carry: int = 0


# The parameter that holds the body of a primitive which computes just that body.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "shard_map": "jaxpr",
    "composite": "call_jaxpr",
    # The forward rule of a custom_vjp with `optimize_remat`, and from 0.12 on what checkpoint leaves of it.
    "remat_opt": "fwd_jaxpr",
    "eval_jaxpr": "call_jaxpr",
}


def bodies_of(eqn: Any) -> Bodies | None:
    """The bodies of an equation that can be built again with other dtypes inside; None for all others."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        # `composite` called its body `jaxpr` before 0.12.
        return Bodies("call", (params[_CALLS[name]] if _CALLS[name] in params else params["jaxpr"],))
    if name == "scan":
        if "ft_in" in params:  # from 0.11 on
            consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
        else:
            consts, carry = params["num_consts"], params["num_carry"]
        return Bodies("scan", (params["jaxpr"],), 0, consts, carry)
    if name == "while":
        start = params["cond_nconsts"] + params["body_nconsts"]
        jaxprs = (params["cond_jaxpr"], params["body_jaxpr"])
        return Bodies("while", jaxprs, params["cond_nconsts"], start, len(eqn.invars) - start)
    if name == "cond":
        return Bodies("cond", tuple(params["branches"]))
    return None


def opened(jaxpr: Any) -> Opened:
    """A jaxpr, open or closed, as the open one and its constants; the two are one class from JAX 0.11 on."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def is_literal(atom: Any) -> bool:
    """Whether an operand is written into the equation. Its ``val`` is no ``np.ndarray`` from JAX 0.7.2 on."""
    return isinstance(atom, Literal)


_ELEMENTS = 2**16
"""Constants of more elements are taken for weights, and not looked at: it would wait for the device."""


def elements_of(constant: Any) -> np.ndarray | None:
    """The elements of a constant; None if they are many, are not at hand, or are no numbers."""
    if isinstance(constant, jax.Array) and (isinstance(constant, core.Tracer) or not constant.is_fully_addressable):
        return None
    if np.size(constant) > _ELEMENTS or jax.dtypes.issubdtype(getattr(constant, "dtype", float), jax.dtypes.extended):
        return None
    return np.asarray(constant)


def extremes_of(constant: Any) -> tuple[float, float] | None:
    """The smallest magnitude but 0 among :func:`elements_of` a constant, and the largest; None if it has none."""
    elements = elements_of(constant)
    return None if elements is None else _extremes(elements.tobytes(), elements.dtype)


@functools.lru_cache(maxsize=128)  # a program has the same numbers again and again
def _extremes(data: bytes, dtype: np.dtype) -> tuple[float, float]:
    magnitudes = np.abs(np.frombuffer(data, dtype).astype(np.float32))
    finite = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]  # the rest exists in every format
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def names_of(eqn: Any) -> Names:
    """The scopes around an equation, outermost first: modules and named scopes, without ``jvp``, ``vmap`` and such."""
    return _scopes(eqn.source_info.name_stack)


def current_names() -> Names:
    """The scopes around the code that runs, as far as a trace knows them: those outside of a ``jit`` it does not."""
    return _scopes(source_info_util.current_name_stack())


def scopes_and_transforms(eqn: Any) -> tuple[Names, tuple[str, ...]]:
    """The scopes around an equation as the author nested them, and the transformations that made it (``"jvp"``, …).

    What checkpoint computes again stands in the scopes of its transposition and once more in its own: these count.
    """
    names: Names = ()
    part: list[str] = []
    transforms = []
    for entry in (*eqn.source_info.name_stack.stack, None):
        if isinstance(entry, source_info_util.Scope):
            part += entry.name.split("/")
            continue
        names = tuple(part) if tuple(part[: len(names)]) == names else (*names, *part)
        part = []
        transforms += [entry.name] if entry is not None else []
    return names, tuple(transforms)


@functools.lru_cache(maxsize=4096)
def _scopes(stack: Any) -> Names:
    scopes = (entry for entry in stack.stack if isinstance(entry, source_info_util.Scope))
    return tuple(part for scope in scopes for part in scope.name.split("/"))


def source_of(eqn: Any) -> str:
    """The file and line that an equation comes from, ``"package/module.py:12"``; empty where JAX knows none.

    The innermost that is neither JAX's nor jaxmp's own, told alike on every machine: from its outermost package on.
    """
    return next(_sources(eqn), "")


def user_source_of(eqn: Any) -> str:
    """As :func:`source_of`, but of what is no installed library."""
    return next(_sources(eqn, _is_users), "")


def static_arguments(jitted: Any) -> tuple[int, ...]:
    """The numbers of the arguments that are static, of what ``jax.jit`` or ``nnx.jit`` returned."""
    numbers = getattr(getattr(jitted, "_jit_info", jitted), "static_argnums", None)
    return (numbers,) if isinstance(numbers, int) else tuple(numbers or ())


def _sources(eqn: Any, is_meant: Callable[[str], bool] = lambda file: True) -> Iterator[str]:
    for frame in _frames(eqn, is_meant):
        yield f"{_from_package(frame.file_name)}:{frame.start_line}"


def _frames(eqn: Any, is_meant: Callable[[str], bool] = lambda file: True) -> Iterator[Any]:
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return (frame for frame in frames if is_meant(frame.file_name))


def _is_users(file: str) -> bool:
    return not _INSTALLED.intersection(Path(file).parts)


def source_among(places: list[tuple[str, int]]) -> str:
    """As :func:`user_source_of`, of files and lines that a program of XLA tells, the innermost first."""
    users = (f"{_from_package(file)}:{line}" for file, line in places if _is_users(file))
    return next(users, "")


@functools.cache
def _from_package(file: str) -> str:
    *folders, top = Path(file).parents
    outside = (folder for folder in folders if not (folder / "__init__.py").exists())
    return Path(file).relative_to(next(outside, top)).as_posix()


_INSTALLED = frozenset({"site-packages", "dist-packages"})
# JAX leaves its own files and Python's library out of the sources of a program. So do jaxmp's, and the modules that are
# frozen into Python, as runpy is.
source_info_util.register_exclusion(str(Path(__file__).parents[2]) + os.sep)  # the folder of jaxmp
source_info_util.register_exclusion("<frozen ")


def evaluate(jaxpr: Any, consts: list[Any], args: Any) -> list[Any]:
    """The results of an open jaxpr as it stands."""
    return list(core.eval_jaxpr(jaxpr, consts, *args))


def asks_for_highest(precision: Any) -> bool:
    """Whether the ``precision`` of a product asks for true float32 on some operand."""
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(
        part is jax.lax.Precision.HIGHEST or str(part).endswith(("F32_F32_F32", "F64_F64_F64")) for part in parts
    )


def asks_for_what_is_missing(params: dict[str, Any]) -> bool:
    """Whether a product asks for an algorithm that the backend lacks.

    JAX's attention tries it, and goes on without when that raises an error: while it is traced none is raised.
    """
    return params.get("precision") is jax.lax.DotAlgorithmPreset.F16_F16_F32 and jax.default_backend() == "cpu"


def names_a_dtype(eqn: Any) -> bool:
    """Whether a parameter fixes the dtype of a result: ``out_dtype`` of ``mul``, a function that a scatter applies."""
    update = eqn.params.get("update_jaxpr")
    return eqn.params.get("out_dtype") is not None or (update is not None and len(update.eqns) > 1)


def in_dtype_of_scatter(jaxpr: Any, dtype: Any) -> Any | None:
    """The update function of a scatter for another dtype; None if it is more than one operation."""
    if len(jaxpr.eqns) > 1:
        return None
    scalars = [jax.ShapeDtypeStruct((), dtype) for _ in jaxpr.invars]
    return opened(jax.make_jaxpr(lambda *args: evaluate(jaxpr, [], args))(*scalars))[0]


def is_tracing() -> bool:
    """Whether what is bound now becomes part of a larger program that is compiled later."""
    return bool(jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE())


def traces_around() -> list[Any]:
    """The traces that the code which runs is a part of, the innermost first."""
    trace, found = core.trace_ctx.trace, []
    while trace is not None:
        found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def batches_around() -> list[Any]:
    """The traces of each ``jax.vmap`` here, the innermost first, those around a derivative too."""
    return [trace for trace in traces_around() if isinstance(trace, BatchTrace)]


def is_batched(value: Any, batch: Any) -> bool:
    """Whether a ``jax.vmap``, of which this is the trace, has a value for each of its examples."""
    while isinstance(value, core.Tracer):
        if value._trace is batch:
            return True
        value = getattr(value, "primal", getattr(value, "val", None))
    return False


def is_staged(value: Any) -> bool:
    """Whether a value belongs to a program that is traced, which a ``jax.vmap`` around it may batch afterwards."""
    return isinstance(value, core.Tracer) and hasattr(value._trace, "frame")


def has_explicit_axes(value: Any) -> bool:
    """Whether a value lies on a mesh on which each operation says where its result is."""
    return bool(jax.typeof(value).sharding.mesh.explicit_axes)


def size_of(shape: Sequence[Any]) -> int:
    """How many elements an array of this shape has; a dimension that ``jax.export`` leaves open counts as 1024."""
    size: Any = math.prod(shape)
    return size if type(size) is int else int(size._evaluate(collections.defaultdict(lambda: 1024)))


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """An abstract value to trace for, which lies where types say that it does."""
    sharding = aval.sharding if aval.sharding.mesh.explicit_axes else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def context() -> Any:
    """What JAX's own caches of traces depend on: its configuration, the mesh, the precision of products."""
    return config.trace_context()


def shows_what_varies() -> bool:
    """Whether types say over which axes a value differs, in the ``shard_map`` that is traced."""
    return bool(config._check_vma.value)


def manual_axes(value: Any) -> tuple[str, ...]:
    """The axes of the mesh over which ``value`` may differ in the ``shard_map`` that is traced."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if shows_what_varies():
        axes = [axis for axis in axes if axis in jax.typeof(value).mat.varying]
    return tuple(axes)


def may_be_skipped() -> bool:
    """Whether some shards of the ``shard_map`` that is traced may not run what is traced: a branch, or turns of a loop.

    JAX notes of a trace what it is made for. Whether a ``fori_loop`` has a fixed number of turns is not known.
    """
    traced = (getattr(getattr(trace, "frame", None), "debug_info", None) for trace in traces_around())
    around = (getattr(info, "traced_for", "") for info in traced)
    optional = {"cond", "switch", "while_cond", "while_body", "fori_loop"}
    return next((purpose in optional for purpose in around if purpose in optional | {"shard_map"}), False)
