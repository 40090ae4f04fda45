"""Report the memory that a compiled program needs, and the batch that fits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp.base import tables
from jaxmp.base.inspection import tool
from jaxmp.inspect._memory.arrays import (
    ArrayInMemory,
    arguments_in_memory,
    results_in_memory,
    temporaries_in_memory,
)
from jaxmp.inspect._memory.batch import largest_multiple_that_fits
from jaxmp.inspect.compiled import compiling, targets
from jaxmp.inspect.compiled.collectives import Collectives
from jaxmp.inspect.compiled.hlo import HloProgram
from jaxmp.inspect.compiled.tpu_targets import DoesNotFitError
from jaxmp.inspect.program.argument_kinds import Leaf, batch_axes, leaves_of, sharding_on_mesh
from jaxmp.inspect.program.calls import names_of_arguments, under_policy
from jaxmp.training.step import TrainStep

KINDS = ("params", "optimizer", "model_state", "batch", "activations", "temporaries", "other")
_SHOWN = 20
_OF_CPU = (
    "A CPU stores most half-precision arrays in float32, so half precision seems to save little memory here. For the "
    "figures of a GPU, write device='h200' (--device h200), which needs pip install -e '.[compile-only]'."
)
_DOES_NOT_COMPILE = 2**62
"""The peak of a program whose compilation fails, because XLA runs out of memory when it tries kernels."""


@dataclasses.dataclass(frozen=True)
class Memory(tables.Shown):
    """The memory and the communication of a compiled program on each device.

    The printed table has the arrays in memory at the peak. Arrays of the same shape and kind share a row if their paths
    differ only in numbers, such as those of equal layers.

    Attributes:
      device: the kind of the device.
      peak: the peak memory in bytes: arguments, results that do not reuse the memory of arguments, and temporaries.
      by_kind: the bytes at the peak by kind; their sum is ``peak``. ``activations`` are computed in the forward pass
        and read after that pass. ``temporaries`` are all other buffers of the compiler, and the gaps between buffers.
        ``other`` are counters, random keys, and results that do not reuse the memory of arguments.
      by_dtype: the bytes at the peak by dtype; their sum is ``peak``. ``"unassigned"`` are bytes without a known array.
      at_peak: the arrays in memory at the peak, largest first, according to the compiler's schedule.
      batch: the size of axis 0 of the batch, on all devices together; None if there is no batch.
      devices: the number of devices.
      collectives: the operations with which one device sends data to others.
      params: the number of values in the params.
      not_counted: lines of the compiled program that could not be read, so that their arrays are unknown.
      notes: remarks on the figures, such as that a CPU stores half-precision arrays in float32.
    """

    device: str
    peak: int
    by_kind: Mapping[str, int]
    by_dtype: Mapping[str, int]
    at_peak: tuple[ArrayInMemory, ...]
    batch: int | None
    _peak_with: Callable[[int], int] = dataclasses.field(repr=False, compare=False)
    devices: int = 1
    collectives: Collectives = dataclasses.field(default_factory=lambda: Collectives(()))
    params: int = 0
    _parts: int = dataclasses.field(default=1, repr=False)
    not_counted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def largest_batch(self, limit: int, *, multiple_of: int = 1, at_most: int | None = None) -> int:
        """Return the largest batch size with a peak of at most ``limit`` bytes.

        The result is the size of axis 0, on all devices together; 0 if nothing fits. To try a size, this method changes
        axis 0 of the batch's first array, and of all arrays of the batch whose axis 0 has the same size. Each size
        needs a compilation. The method always tries the result, and also the next larger size, which does not fit or is
        larger than ``at_most``. If the memory does not always grow with the batch size, a still larger batch may fit.

        Args:
          limit: the limit in bytes, such as ``jaxmp.hardware.detect("h200").memory_bytes``.
          multiple_of: the result is a multiple of this number. Pass 8 for a GPU: tensor cores are fastest if the
            dimensions of a product are multiples of 8, and the batch size is often one of them. On n devices, pass 8 n,
            because each device gets its part of the batch. The result is also a multiple of the number of parts into
            which devices and microbatches split the batch.
          at_most: the largest batch size to try, such as the number of training examples; None for no limit.

        Raises:
          ValueError: there is no batch, or the peak does not depend on the batch size.
        """
        if self.batch is None:
            raise ValueError(
                "largest_batch scales axis 0 of the batch, but no argument is a batch; pass the batch after the params "
                "or the state, as an array or a pytree of arrays"
            )

        def peak_of(size: int) -> int:
            return self.peak if size == self.batch else self._peak_with(size)

        step = math.lcm(multiple_of, self._parts)
        return largest_multiple_that_fits(peak_of, limit, step, self.batch, at_most)

    def _shown(self) -> Any:
        unit, unit_bytes = tables.byte_unit(self.peak)

        def number(size: int) -> str:
            return f"{size / unit_bytes:,.1f}"

        batch = f", batch of {self.batch}" if self.batch is not None else ""
        where = f"each of {self.devices} {self.device}" if self.devices > 1 else self.device
        lines = [f"{number(self.peak)} {unit} at the peak on {where}{batch}"]
        for name, sizes in (("kind", self.by_kind), ("dtype", self.by_dtype)):
            lines.append(f"by {name}: " + ", ".join(f"{key} {number(size)}" for key, size in sizes.items() if size))
        if self.devices > 1:
            lines.append(self.sent)
        rows = []
        groups = tables.grouped(self.at_peak, _key_of_array)
        groups.sort(key=_bytes_of, reverse=True)
        for group in groups[:_SHOWN]:
            _, kind, shape, source = _key_of_array(group[0])
            path = tables.common_path([array.path for array in group])
            rows.append((number(_bytes_of(group)), len(group), kind, shape, path, source))
        columns = unit, "arrays", "kind", "shape", "path", "source"
        return "\n".join([*lines, *self.notes]), columns, rows, tables.not_counted(self.not_counted)

    @property
    def sent(self) -> str:
        """Return a line of text with the bytes that each device sends.

        The line has the total, the bytes per param, and the parts by kind, dtype and mesh axis.
        """
        wire = self.collectives.wire
        per_param = f", {wire / self.params:.2f} bytes per param" if self.params else ""
        parts = (f"{' '.join(key)} {tables.byte_text(size)}" for key, size in self.collectives.totals.items())
        return f"sent by each device: {tables.byte_text(wire)}{per_param}: {', '.join(parts)}".removesuffix(": ")


def _key_of_array(array: ArrayInMemory) -> tuple[str, str, str, str]:
    """Return a key that is equal for the arrays of equal layers."""
    shape = ",".join(map(str, array.shape))
    return tables.without_numbers(array.path), array.kind, f"{array.dtype}[{shape}]", array.source


def _bytes_of(arrays: Sequence[ArrayInMemory]) -> int:
    return sum(array.bytes for array in arrays)


@tool
def memory(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    overrides: Mapping[str, str] | None = None,
    device: str | None = None,
    topology: str | None = None,
) -> Callable[..., Memory]:
    """Return a function that computes the memory of a call of ``fun``.

    ``fun`` is compiled but not executed. Each array of the arguments has a kind (params, batch and so on). For a
    ``TrainState``, an NNX model or optimizer, an optax state, and Flax's collections, the type determines the kind. For
    other types, the names ``params``, ``opt_state``, ``model_state``, ``batch`` and ``rng`` determine the kind. For
    other names, the first argument is the params, and later arguments are the batch.

    Args:
      fun: a train step, a function that JAX can compile, or a jitted function. If results reuse the memory of donated
        arguments, this memory is counted once.
      policy: a policy with which :func:`jaxmp.autocast` runs ``fun``. Then no argument is donated, except those of a
        train step. Leave it out for a train step that was made with a policy.
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      device: None for the attached device, or the name of a device that is not attached: a GPU (``"h200"``,
        ``"a100"``, ``"b200"``, ``"l4"``, …), a TPU (``"v5e"``, ``"v5p"``, ``"v6e"``, ``"v4"``, ``"tpu7x"``) or a slice
        of TPUs (``"v5p:4x4x4"``). These devices need the packages of the extra ``compile-only``.
      topology: the topology of a cluster of such GPUs: slices × hosts × GPUs per host (``"1x1x8"`` or ``"2 hosts x
        4"``); None for one host. With a topology, or with a slice of TPUs, the arguments are arrays or shapes with a
        ``NamedSharding``, whose mesh may be a ``jax.sharding.AbstractMesh``. All numbers are for one device.

    Returns:
      A function of ``fun``'s arguments, or their shapes, that returns a :class:`Memory`.

    Raises:
      ValueError: ``device`` is unknown; the topology is malformed or does not fit the mesh; the arguments are not on a
        mesh; the compiler does not report the memory; or the program needs more memory than a TPU has.
      ModuleNotFoundError: the packages that compile for ``device`` are missing.

    >>> shapes = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> plan = jaxmp.inspect.memory(lambda params, batch: (batch @ params).sum())(*shapes)
    >>> plan.by_kind["params"], plan.by_kind["batch"], sum(plan.by_kind.values()) == plan.peak
    (128, 64, True)
    """
    fun = under_policy(fun, policy, overrides)

    def memory_of_call(*args: Any) -> Memory:
        return of_call(compiling.compile_call(fun, args, device, topology))

    return memory_of_call


def of_call(call: compiling.CompiledCall) -> Memory:
    """Return the memory of a compiled call."""
    function, inputs, compiled, program = call.function, call.inputs, call.compiled, call.program
    leaves = list(leaves_of(inputs, names_of_arguments(function)))
    batch = [leaf.value for leaf in leaves if leaf.kind == "batch"]
    sizes = [np.shape(array)[0] for array in batch if np.shape(array)]
    size = sizes[0] if sizes else None

    @functools.cache
    def peak_with(new_size: int) -> int:
        resized = [_resized(leaf, size, new_size) for leaf in leaves]
        args = jax.tree.unflatten(jax.tree.structure(inputs), resized)
        try:
            return _peak(compiling.compiled(function, args, call.device, call.topology))
        except DoesNotFitError as error:
            return error.needed
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _DOES_NOT_COMPILE

    params = [leaf.value for leaf in leaves if leaf.kind == "params" and "ema_params" not in leaf.path.split("/")]
    axes = batch_axes(batch)
    microbatches = function.update.accumulate_steps if isinstance(function, TrainStep) else 1
    peak, by_kind, by_dtype, arrays = _measured(compiled, program, leaves)
    return Memory(
        device=targets.target_of(call.device).name if call.device else jax.devices()[0].device_kind,
        peak=peak,
        by_kind=by_kind,
        by_dtype=by_dtype,
        at_peak=arrays,
        batch=size,
        devices=program.partitions,
        collectives=call.collectives,
        params=sum(math.prod(np.shape(leaf)) for leaf in params),
        _peak_with=peak_with,
        _parts=math.prod(axes.values()) * microbatches,
        not_counted=program.not_counted,
        notes=(_OF_CPU,) if call.device is None and jax.default_backend() == "cpu" and _has_half(program) else (),
    )


def _has_half(program: HloProgram) -> bool:
    """Return whether a program has arrays in half precision."""
    instructions = (known for computation in program.computations.values() for known in computation.values())
    return any(array.dtype in ("bf16", "f16") for known in instructions for array in known.arrays)


def _resized(leaf: Leaf, size: int | None, new_size: int) -> Any:
    """Return the shape of a batch's array, resized to ``new_size`` examples.

    Leaves outside of the batch are returned unchanged.
    """
    value = leaf.value
    if leaf.kind != "batch" or np.shape(value)[:1] != (size,):
        return value
    shape = (new_size, *value.shape[1:])
    return jax.ShapeDtypeStruct(shape, targets.dtype_in_jax(value), sharding=sharding_on_mesh(value))


def _peak(compiled: jax.stages.Compiled) -> int:
    peak = compiling.peak_bytes(compiled)
    if peak is None:
        raise ValueError(
            "the compiler of this device does not report the memory of a program; name a device: " + targets.choice()
        )
    return peak


def _measured(
    compiled: jax.stages.Compiled, program: HloProgram, leaves: Sequence[Leaf]
) -> tuple[int, dict[str, int], dict[str, int], tuple[ArrayInMemory, ...]]:
    """Return the peak in total, by kind and by dtype, and the arrays at the peak."""
    stats: Any = compiled.memory_analysis()
    peak = _peak(compiled)
    temporaries, unassigned = temporaries_in_memory(program, int(stats.temp_size_in_bytes))
    arrays = [
        *arguments_in_memory(compiled, program, leaves),
        *results_in_memory(compiled, program),
        *temporaries,
    ]
    by_kind, by_dtype = Counter(dict.fromkeys(KINDS, 0)), Counter[str]()
    for array in arrays:
        by_kind[array.kind] += array.bytes
        by_dtype[array.dtype] += array.bytes
    by_kind["temporaries"] += unassigned
    by_kind["other"] += peak - sum(by_kind.values())  # such as XLA's tables of pointers
    by_dtype["unassigned"] += peak - sum(by_dtype.values())
    arrays.sort(key=lambda array: -array.bytes)
    return peak, dict(by_kind), dict(by_dtype.most_common()), tuple(arrays)
