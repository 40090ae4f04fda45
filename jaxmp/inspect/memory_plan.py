"""The memory that a compiled program needs: how much, for what, and up to which batch it fits."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxmp.base import tables
from jaxmp.base.trees import path_name
from jaxmp.inspect.compiled import memory_of_hlo
from jaxmp.inspect.compiled.hlo import Array, HloProgram, dtype_name
from jaxmp.inspect.program import compiling, targets
from jaxmp.inspect.program.calls import names_of_arguments
from jaxmp.inspect.traffic import Collectives, collectives, ideal_wire
from jaxmp.sharding.specs import names_of as axes_of

KINDS = ("params", "optimizer", "model_state", "batch", "activations", "temporaries", "other")
_NAMES = {
    "params": "params", "ema_params": "params", "opt_state": "optimizer", "optimizer": "optimizer",
    "model_state": "model_state", "batch_stats": "model_state", "batch": "batch", "rng": "other", "key": "other",
    "step": "other", "skipped": "other", "stuck": "other",
}  # fmt: skip
_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Held:
    """An array that is in memory when most is.

    Attributes:
      bytes: on one device.
      dtype: NumPy's name.
      shape: its sizes.
      kind: one of :data:`KINDS`.
      path: of an argument or a result where it is in it, else the modules and scopes that compute it, ``/`` between.
      source: the user's file and line that computes it; empty of an argument.
    """

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    kind: str
    path: str
    source: str


@dataclasses.dataclass(frozen=True)
class Memory(tables.Shown):
    """The memory that a compiled program needs, on each device, and what devices send each other.

    Attributes:
      device: its kind.
      peak: bytes of the arguments, of results that are not written into arguments, and of temporaries.
      by_kind: bytes by :data:`KINDS`; their sum is ``peak``. ``activations`` are made in the forward pass and read
        after it; ``temporaries`` are all that the program needs besides, the compiler's gaps between buffers included;
        ``other`` are counters, keys, and results that are no new state.
      by_dtype: bytes by dtype; ``"unassigned"`` is what no array accounts for. Their sum is ``peak``.
      at_peak: the arrays, largest first; those of the compiler's are found by following its schedule.
      batch: the size of axis 0 of the batch, of all devices; None where there is no batch.
      devices: how many there are.
      collectives: what each of them sends.
      ideal_wire: bytes that each has to send in a training step, see :func:`jaxmp.inspect.ideal_wire`; None where
        params or batch lie on no mesh.
      params: how many numbers the params are.
    """

    device: str
    peak: int
    by_kind: Mapping[str, int]
    by_dtype: Mapping[str, int]
    at_peak: tuple[Held, ...]
    batch: int | None
    _peak_with: Callable[[int], int] = dataclasses.field(repr=False, compare=False)
    devices: int = 1
    collectives: Collectives = dataclasses.field(default_factory=lambda: Collectives(()))
    ideal_wire: float | None = None
    params: int = 0
    _parts: int = dataclasses.field(default=1, repr=False)

    def largest_batch(self, limit: int, *, multiple_of: int = 1) -> int:
        """The largest size of the batch's axis 0 with which the peak is at most ``limit`` bytes; 0 when nothing fits.

        It compiles few sizes: the line through two of them says where to look, and what it says is verified, as is
        that one batch more does not fit. Where a larger batch takes less memory, as the compiler may have it, a still
        larger one may fit again: it is not looked for. All arrays of the batch whose axis 0 is as long as that of the
        first one are scaled.

        Args:
          limit: bytes, as of :attr:`jaxmp.inspect.program.targets.Target.memory_bytes`.
          multiple_of: only such sizes are tried: for a step that accumulates gradients, or for tensor cores. Where the
            batch is split over devices, those are tried that they divide, too.

        Raises:
          ValueError: there is no batch, its size makes no difference, or ``multiple_of`` is no positive integer.
        """
        if not isinstance(multiple_of, (int, np.integer)) or multiple_of < 1:
            raise ValueError(
                f"the batch is a multiple of a positive integer, got multiple_of={multiple_of!r}; leave it out, or "
                "pass the number of microbatches, or 8 for tensor cores"
            )
        if self.batch is None:
            raise ValueError(
                "largest_batch scales axis 0 of the batch, but no argument is one; pass the batch after the params or "
                "the state, as an array or a pytree of arrays"
            )
        step, peaks = math.lcm(int(multiple_of), self._parts), {0: 0}

        def fits(turns: int) -> bool:
            if turns not in peaks:
                peaks[turns] = self.peak if turns * step == self.batch else self._peak_with(turns * step)
            return peaks[turns] <= limit

        if not fits(1):
            return 0
        low, high = 1, None
        guess = max(2, -(-self.batch // step))
        while high is None or high - low > 1:
            if fits(guess):
                low = guess
            else:
                high = guess
            known = sorted(size for size in peaks if size)[-2:] if high is None else [low, high]
            slope = (peaks[known[1]] - peaks[known[0]]) / (known[1] - known[0])
            if high is None and (peaks[1] == peaks[low] or low * step > 2**40):
                raise ValueError(
                    f"largest_batch found that {step} and {low * step} examples take as much memory: axis 0 of what it "
                    "takes for the batch makes no difference; pass the batch after the params"
                )
            ahead = low + int((limit - peaks[low]) / slope) if slope > 0 else (low + (high or 3 * low)) // 2
            if high is None:
                guess = min(max(low + 1, ahead), 256 * low)  # two sizes that need almost the same tell little
            elif len(peaks) > 8:
                guess = (low + high) // 2
            else:
                guess = min(max(low + 1, ahead + (ahead == low)), high - 1)
        return low * step

    def _shown(self) -> Any:
        # Of a small program all would be 0.0 MiB.
        unit, size = ("MiB", 2**20) if self.peak >= 10 * 2**20 else ("KiB", 2**10)

        def number(count: int) -> str:
            return f"{count / size:,.1f}"

        batch = f", batch of {self.batch}" if self.batch is not None else ""
        where = f"each of {self.devices} {self.device}" if self.devices > 1 else self.device
        lines = [f"{number(self.peak)} {unit} at the peak on {where}{batch}"]
        for name, sizes in (("kind", self.by_kind), ("dtype", self.by_dtype)):
            lines.append(f"by {name}: " + ", ".join(f"{key} {number(size)}" for key, size in sizes.items() if size))
        lines += [self.sent] if self.devices > 1 else []
        rows: list[tuple[Any, ...]] = [
            (number(each.bytes), each.kind, f"{each.dtype}[{','.join(map(str, each.shape))}]", each.path, each.source)
            for each in self.at_peak[:_SHOWN]
        ]
        return "\n".join(lines), (unit, "kind", "array", "path", "source"), rows, ()

    @property
    def sent(self) -> str:
        """What each device sends, in a line: bytes, bytes a param beside the ideal, and by kind, dtype and axis."""
        wire, a_param = self.collectives.wire, ""
        if self.ideal_wire is not None:
            a_param = f", {wire / self.params:.2f} bytes a param (ideal {self.ideal_wire / self.params:.2f})"
        parts = (f"{' '.join(key)} {tables.short(size)}B" for key, size in self.collectives.totals.items())
        return f"sent by each: {tables.short(wire)}B{a_param}: {', '.join(parts)}".removesuffix(": ")


def memory(fun: Callable[..., Any], *, device: str | None = None, topology: str | None = None) -> Callable[..., Memory]:
    """The memory that a call of ``fun`` needs, from its compiled program; nothing is executed.

    What is what is known from a ``TrainState``, an NNX model or optimizer, an optax state and Flax's collections; else
    from the names ``params``, ``opt_state``, ``model_state``, ``batch``, ``rng`` of the arguments; else the first
    argument is the params, and those after it are the batch.

    Args:
      fun: a train step, any function that JAX can compile, or a jitted one, whose donation counts.
      device: None for the attached device, or the name of a GPU that is not there (``"h200"``, ``"h100"``, ``"a100"``,
        ``"b200"``, ``"l4"``, ``"t4"``), for which the packages of the extra ``compile-only`` are needed.
      topology: of a cluster of such GPUs, over which the arguments are split: slices × hosts × GPUs of each host,
        ``"1x1x8"``, or ``"2 hosts x 4"``; None for one host. Arguments are arrays or shapes with a ``NamedSharding``,
        whose mesh may be a ``jax.sharding.AbstractMesh``, and all is told of one device.

    Returns:
      A function of the arguments of ``fun``, arrays or shapes.

    Raises (from the call):
      ValueError: an unknown name, a topology that is none, that does not fit the mesh, or arguments that lie on no
        mesh; the compiler does not tell what it needs.
      ModuleNotFoundError: packages that compile for a GPU that is not there are missing.

    >>> shapes = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> found = jaxmp.inspect.memory(lambda params, batch: (batch @ params).sum())(*shapes)
    >>> found.by_kind["params"], found.by_kind["batch"], sum(found.by_kind.values()) == found.peak
    (128, 64, True)
    """

    def plan(*args: Any) -> Memory:
        call, inputs = compiling.call_of(fun, args)
        compiled = compiling.compiled(call, inputs, device, topology)
        return of_call(call, inputs, compiled, HloProgram(str(compiled.as_text())), device, topology)

    return plan


def of_call(
    call: Any,
    inputs: tuple[Any, ...],
    compiled: jax.stages.Compiled,
    program: HloProgram,
    device: str | None,
    topology: str | None,
) -> Memory:
    """Return the memory of a compiled call of :func:`jaxmp.inspect.program.compiling.call_of`."""
    leaves = list(leaves_of(inputs, names_of_arguments(call)))
    first = next((leaf.value for leaf in leaves if leaf.kind == "batch" and np.shape(leaf.value)), None)
    batch = None if first is None else np.shape(first)[0]

    def with_batch(size: int) -> int:
        scaled = [
            jax.ShapeDtypeStruct((size, *value.shape[1:]), value.dtype, sharding=on_mesh(value))
            if kind == "batch" and tuple(np.shape(value))[:1] == (batch,)
            else value
            for value, kind, *_ in leaves
        ]
        resized = jax.tree.unflatten(jax.tree.structure(inputs), scaled)
        try:
            return _peak(compiling.compiled(call, resized, device, topology).memory_analysis())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):  # the compiler tries kernels, and those had no room
                raise
            return 2**62

    read = _read(compiled, program, leaves, batch, device, functools.cache(with_batch))
    params = [leaf.value for leaf in leaves if leaf.kind == "params" and "ema_params" not in leaf.path.split("/")]
    axes = batch_axes(leaf.value for leaf in leaves if leaf.kind == "batch")
    is_known = bool(params and axes) and all(map(on_mesh, params))
    return dataclasses.replace(
        read,
        devices=program.partitions,
        collectives=collectives(compiled, program),
        ideal_wire=ideal_wire(params, axes) if is_known else None,
        params=sum(math.prod(np.shape(leaf)) for leaf in params),
        _parts=math.prod(axes.values()),
    )


def on_mesh(leaf: Any) -> Any:
    """Where on a mesh a leaf lies; None if it lies on none."""
    where = getattr(leaf, "sharding", None)
    return where if isinstance(where, NamedSharding) else None


def batch_axes(batch: Iterable[Any]) -> dict[str, int]:
    """The axes of the mesh that axis 0 of a batch is split over, and their sizes; none if it lies on none."""
    found = (
        {name: where.mesh.shape[name] for name in axes_of(where.spec[:1])} for where in map(on_mesh, batch) if where
    )
    return next(filter(None, found), {})


def _peak(stats: Any) -> int:
    """Bytes of a compiled program's arguments, results that reuse none of them, and temporaries."""
    if stats is None:
        raise ValueError(
            "the compiler must tell how much memory a program takes, but this device's says nothing; name a GPU: "
            + targets.choice()
        )
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(stats.argument_size_in_bytes + results + stats.temp_size_in_bytes)


def _read(
    compiled: jax.stages.Compiled,
    program: HloProgram,
    leaves: Sequence[Leaf],
    batch: int | None,
    device: str | None,
    peak_with: Callable[[int], int],
) -> Memory:
    """What a compiled program says of its flat arguments."""
    stats: Any = compiled.memory_analysis()
    peak = _peak(stats)
    temporaries, rest = _temporaries(program, int(stats.temp_size_in_bytes))
    held = [*_arguments(compiled, program, leaves), *_results(compiled, program), *temporaries]
    by_kind, by_dtype = Counter(dict.fromkeys(KINDS, 0)), Counter[str]()
    for each in held:
        by_kind[each.kind] += each.bytes
        by_dtype[each.dtype] += each.bytes
    by_kind["temporaries"] += rest
    by_kind["other"] += peak - sum(by_kind.values())  # tables of pointers
    by_dtype["unassigned"] += peak - sum(by_dtype.values())
    return Memory(
        device=targets.target_of(device).name if device else jax.devices()[0].device_kind,
        peak=peak,
        by_kind=dict(by_kind),
        by_dtype=dict(by_dtype.most_common()),
        at_peak=tuple(sorted(held, key=lambda each: -each.bytes)),
        batch=batch,
        _peak_with=peak_with,
    )


def _arguments(compiled: Any, program: HloProgram, leaves: Sequence[Leaf]) -> Iterator[Held]:
    shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)  # None for what the program does not use
    used = [(leaf.kind, leaf.path) for leaf, sharding in zip(leaves, shardings, strict=True) if sharding is not None]
    parameters = [each for each in program.computations[program.entry].values() if each.opcode == "parameter"]
    parameters.sort(key=lambda each: int(re.findall(r"parameter\((\d+)\)", each.text)[0]))
    given = [("other", "constant")] * (len(parameters) - len(used)) + used  # JAX may pass large constants first
    for each, (kind, path) in zip(parameters, given, strict=True):
        yield from (_held(array, kind, path) for array in each.arrays)


def _results(compiled: Any, program: HloProgram) -> Iterator[Held]:
    """Those that are not written into arguments."""
    arrays = list(program.computations[program.entry].values())[-1].arrays
    made = [(leaf.kind, leaf.path) for leaf in leaves_of((compiled.out_info,), [], unknown="other")]
    if len(made) != len(arrays):  # JAX does not return what is an argument
        made = [("other", "result")] * len(arrays)
    for number, (array, (kind, path)) in enumerate(zip(arrays, made, strict=True)):
        if number not in program.aliases:
            yield _held(array, kind, path)


def _temporaries(program: HloProgram, size: int) -> tuple[list[Held], int]:
    """The compiler's buffers at the peak, and how many of these ``size`` bytes none of them accounts for."""
    held = []
    for buffer in memory_of_hlo.peak(program):
        if buffer.bytes <= size:  # they are an estimate, and may be a little too much
            size -= int(buffer.bytes)
            kind = "activations" if _is_kept(program, buffer) else "temporaries"
            made_by = program.made_by(buffer.maker)
            held.append(_held(buffer.array, kind, made_by.path, program.source(made_by)))
    return held, size


def _held(array: Array, kind: str, path: str, source: str = "") -> Held:
    return Held(int(array.bytes), dtype_name(array.dtype), array.shape, kind, path, source)


def _is_kept(program: HloProgram, buffer: memory_of_hlo.Buffer) -> bool:
    """Whether a buffer is made in the forward pass and read after it, by the names that JAX gives to operations."""
    made, read = program.made_by(buffer.maker).op_name, program.made_by(buffer.last).op_name
    return _is_forward(made) and not _is_forward(read)


def _is_forward(op_name: str) -> bool:
    return "jvp(" in op_name and "transpose(" not in op_name and "rematted_computation" not in op_name


class Leaf(NamedTuple):
    """A leaf of arguments; ``is_told`` if its type or the argument's name says of which kind it is, not its place."""

    value: Any
    kind: str
    path: str
    is_told: bool


def leaves_of(args: Sequence[Any], names: Sequence[str], unknown: str = "") -> Iterator[Leaf]:
    """The leaves of arguments with their kinds and paths.

    What is not recognised has the kind ``unknown``, as in results, among which a collection of params may be one of
    gradients. Without one it goes by position: the first argument is the params, and those after it are the batch.
    """

    def kind_of(node: Any, path: Sequence[Any] = ()) -> str | None:
        return None if unknown and isinstance(node, Mapping) else _kind_of(node, path)

    for position, arg in enumerate(args):
        name = names[position] if position < len(names) else ""
        found = jax.tree.leaves_with_path(arg, is_leaf=lambda node: kind_of(node) is not None)
        is_known = any(kind_of(node) is not None for _, node in found)
        for path, node in found:
            for inner, leaf in jax.tree.leaves_with_path(node):
                told = kind_of(node, inner) or _NAMES.get(name)
                kind = told or unknown or ("batch" if position and not is_known else "params")
                if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
                    kind = "other"
                names_in = (*([jax.tree_util.DictKey(name)] if name else []), *path, *inner)
                yield Leaf(leaf, kind, path_name(names_in), told is not None)


def _kind_of(node: Any, path: Sequence[Any]) -> str | None:
    """The kind of the leaf at ``path`` in a node that says it; of its first one without a path; None for all others."""
    field = str(getattr(path[0], "name", getattr(path[0], "key", ""))) if path else "params"
    if isinstance(node, nnx.Variable):
        opt = type(node).__name__.startswith("Opt")
        return "params" if isinstance(node, nnx.Param) else "optimizer" if opt else "model_state"
    if isinstance(node, nnx.Optimizer) or (hasattr(node, "_fields") and _module(node) in ("optax", "jaxmp")):
        return "optimizer"
    if isinstance(node, Mapping):
        return _NAMES.get(field, "model_state") if "params" in node else None
    if hasattr(node, "params") and hasattr(node, "opt_state"):  # jaxmp's TrainState and Flax's
        return _NAMES.get(field, "model_state")
    return None


def _module(node: Any) -> str:
    return type(node).__module__.partition(".")[0]
