"""Compile a call for the attached device, or for a GPU or TPU that is not attached."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._internals.flax.nnx import note_for_changes
from jaxmp._internals.jax.traces import static_arguments
from jaxmp.base import hardware
from jaxmp.inspect.compiled import meshes, targets
from jaxmp.inspect.compiled.collectives import Collectives, collectives_of
from jaxmp.inspect.compiled.hlo import HloProgram
from jaxmp.inspect.program.calls import named, scoped_state_of
from jaxmp.inspect.program.function_leaves import separated
from jaxmp.inspect.program.tracing import NOTE_FOR_TOOLS
from jaxmp.nnx.training import TrainStep as NNXTrainStep
from jaxmp.nnx.training import state_of
from jaxmp.program.traced_program import is_array
from jaxmp.training.step import TrainStep


def call_of(fun: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return a function with a ``trace`` method, and the arguments to trace it with.

    The returned arguments are arrays and shapes. The returned function already contains the other arguments: the static
    arguments of a jitted function, and all Python values of an unjitted function. If ``fun`` is unjitted and ``args``
    contains NNX models, the calls of their modules are put in named scopes.
    """
    if isinstance(fun, (TrainStep, NNXTrainStep)):
        fun.require_arguments(*args)
    if isinstance(fun, NNXTrainStep):
        step = fun.of_trees
        fun, args = step, (_state_of(step, *args[:2]), *args[2:])
    if isinstance(fun, TrainStep):  # its program depends on the sharding of the state
        has_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
        return fun, tuple(args if has_shapes else fun.place(*args))
    if hasattr(fun, "trace"):
        return _with_static_arguments(fun, args)

    others, arrays = separated(tuple(args), is_array)

    @functools.wraps(fun)
    def of_arrays(*arrays: Any) -> Any:
        return fun(*named(others.put_back(arrays)))

    return jax.jit(of_arrays), arrays


def _state_of(step: TrainStep, model: Any, optimizer: Any) -> Any:
    """Return the train state of an NNX model, with scopes around its modules.

    There are no scopes if they would change the step: ``remat="layers"`` finds layers by their scopes, but the real
    step has no scopes if the model has no policy.
    """
    recomputes_layers = step.remake is not None and step.options.get("remat") == "layers"
    return (state_of if recomputes_layers else scoped_state_of)(model, optimizer)


def _with_static_arguments(jitted: Any, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Bind the static arguments of a jitted function, and return its other arguments."""
    static = {}
    for number in static_arguments(jitted):
        if -len(args) <= number < len(args):
            static[number % len(args)] = args[number]
    if not static:
        return jitted, tuple(args)
    arrays = tuple(None if number in static else arg for number, arg in enumerate(args))
    return _WithStaticArguments(jitted, static), arrays


class _WithStaticArguments:
    """A jitted function with values for its static arguments, by argument number."""

    def __init__(self, fun: Any, static: Mapping[int, Any]) -> None:
        self.fun, self.static = fun, static
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *arrays: Any) -> Any:
        return self.fun(*self._arguments(arrays))

    def trace(self, *arrays: Any) -> Any:
        return self.fun.trace(*self._arguments(arrays))

    def _arguments(self, arrays: Sequence[Any]) -> list[Any]:
        return [self.static.get(n, array) for n, array in enumerate(arrays)]


def trace_of_call(
    fun: Callable[..., Any],
    args: Sequence[Any],
    device: str | None = None,
    compiles: bool = True,
    topology: str | None = None,
) -> Any:
    """Return the trace of a call, for :func:`compiled_of`.

    Args:
      fun: a train step, a function, or a jitted function (``jax.jit``, ``nnx.jit``), whose donation is kept.
      args: the positional arguments of ``fun``, arrays or shapes. If an argument has a ``NamedSharding``, the program
        is compiled for a mesh with the same axes.
      device: None for the attached device, or a name that :func:`targets.target_of` reads.
      compiles: whether you will compile the trace. With False, the packages that compile for the device are not needed.
      topology: the topology of the mesh, such as ``"1x2x4"`` for two hosts with four GPUs each; None for one host.

    Raises:
      ValueError: the device is unknown, or the topology does not fit the mesh.
      ModuleNotFoundError: the packages that compile for the device are missing.
    """
    jitted, args = call_of(fun, args)
    mesh = meshes.mesh_of(args)
    if topology is not None:
        _check_topology_fits(topology, device, mesh)
    if device is not None and compiles:
        target = targets.target_of(device)
        if mesh is None and target.is_slice:
            raise ValueError(
                f"a slice of TPUs needs arguments on a mesh, got {device!r} and no NamedSharding; pass e.g. "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec)), or name one device: "
                f"{device.partition(':')[0]!r}"
            )
        args = targets.on(target.devices()[0], args) if mesh is None else targets.on_mesh(target, args, topology)
    if isinstance(jitted, TrainStep):
        jitted = jitted.program_for(args[0])
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(note_for_changes(NOTE_FOR_TOOLS))
        contexts.enter_context(meshes.within_mesh_of_shapes(args))
        if device is not None:
            contexts.enter_context(targets.target_of(device).tracing())
            contexts.enter_context(hardware.assumed(device))
        return jitted.trace(*args)


def _check_topology_fits(topology: str, device: str | None, mesh: Any) -> None:
    if device is None:
        raise ValueError(f"a topology needs the name of a GPU, got {topology!r} without one; add {targets.choice()}")
    if mesh is None:
        raise ValueError(
            f"a topology needs arguments on a mesh, got {topology!r} and no NamedSharding; pass e.g. "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))"
        )


def lowered_of(trace: Any, device: str | None = None) -> Any:
    """Lower a trace of :func:`trace_of_call`, with the same ``device``."""
    if device is None:
        return trace.lower()
    target = targets.target_of(device)
    with target.tracing():
        return trace.lower(lowering_platforms=(target.platform,))


def compiled_of(trace: Any, device: str | None = None) -> jax.stages.Compiled:
    """Compile a trace of :func:`trace_of_call`, with the same ``device``."""
    lowered = lowered_of(trace, device)
    lowered = getattr(lowered, "lowered", lowered)  # nnx.jit wraps the lowered program
    if device is None:
        program: jax.stages.Compiled = lowered.compile()
    else:
        target = targets.target_of(device)
        with target.tracing():
            program = target.compile(lowered)
    return program


@dataclasses.dataclass(frozen=True)
class CompiledCall:
    """A call that was compiled, but not executed.

    Attributes:
      function: the function, as :func:`call_of` returns it.
      inputs: the arguments of ``function``.
      trace: the traced call.
      compiled: the compiled call.
      device, topology: as for :func:`trace_of_call`.
    """

    function: Any
    inputs: tuple[Any, ...]
    trace: Any
    compiled: jax.stages.Compiled
    device: str | None = None
    topology: str | None = None

    @functools.cached_property
    def program(self) -> HloProgram:
        """The compiled program."""
        return HloProgram(str(self.compiled.as_text()))

    @functools.cached_property
    def collectives(self) -> Collectives:
        """The data that the program moves between devices."""
        return collectives_of(self.compiled, self.program)


def compile_call(
    fun: Callable[..., Any], args: Sequence[Any], device: str | None = None, topology: str | None = None
) -> CompiledCall:
    """Compile the call ``fun(*args)`` for a tool.

    The arguments and errors are those of :func:`trace_of_call`.
    """
    function, inputs = call_of(fun, args)
    trace = trace_of_call(function, inputs, device, topology=topology)
    return CompiledCall(function, inputs, trace, compiled_of(trace, device), device, topology)


def compiled(
    fun: Callable[..., Any], args: Sequence[Any], device: str | None = None, topology: str | None = None
) -> jax.stages.Compiled:
    """Compile the call ``fun(*args)``.

    The arguments and errors are those of :func:`trace_of_call`.
    """
    return compiled_of(trace_of_call(fun, args, device, topology=topology), device)


def peak_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Return the bytes that a compiled program needs; None if the compiler does not report them.

    These are the bytes of arguments, of results that do not reuse the memory of arguments, and of temporaries.
    """
    stats: Any = compiled.memory_analysis()
    if stats is None:
        return None
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(stats.argument_size_in_bytes + results + stats.temp_size_in_bytes)


def call_with_options(
    fun: Callable[..., Any], args: Sequence[Any], compiler_options: Mapping[str, Any]
) -> tuple[Callable[..., Any], str]:
    """Compile the call ``fun(*args)`` for the attached device, with options of XLA.

    Args:
      fun: a train step or a jitted function.
      args: the arguments of ``fun``.
      compiler_options: the options of XLA by name.

    Returns:
      A function that runs the program, and the program's HLO text. The function takes the arguments of ``fun``. For
      arguments of other shapes it compiles another program.
    """
    programs: dict[Any, Any] = {}

    def program_for(args: Sequence[Any]) -> Any:
        leaves, structure = jax.tree.flatten(args)
        key = structure, tuple((jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        if key not in programs:
            programs[key] = trace_of_call(fun, args).lower().compile(compiler_options=dict(compiler_options))
        return programs[key]

    def run(*args: Any) -> Any:
        jitted, arrays = call_of(fun, args)
        static = jitted.static if isinstance(jitted, _WithStaticArguments) else {}
        return program_for(args)(*(array for number, array in enumerate(arrays) if number not in static))

    return run, str(program_for(args).as_text())
