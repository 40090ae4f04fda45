"""Keep the programs that were compiled for a TPU on disk, because compiling them takes minutes."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.metadata
import itertools
import json
import os
import sys
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxmp._internals.jax.executables import compiler_options_of
from jaxmp._internals.jax.sources import source_among
from jaxmp.inspect.compiled.hlo import HloProgram
from jaxmp.inspect.compiled.meshes import mesh_of

_FORM = 2
"""The form of the files. A file of another form has another name."""
_SETTINGS = ("jax_exec_time_optimization_effort", "jax_memory_fitting_effort", "jax_optimization_level")
"""The settings of JAX that change what the compiler does."""
_VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
"""The environment variables that change what the compiler does."""
_SIZES = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
)


@dataclasses.dataclass(frozen=True)
class StoredProgram:
    """The parts of a compiled program that the tools of jaxmp.inspect read.

    It has the methods of ``jax.stages.Compiled`` that are needed for this.

    Attributes:
      in_tree: the structure of the arguments.
      out_info: the shapes and dtypes of the results.
      input_shardings: a pytree like the arguments. It has None for each argument that the program does not use.
    """

    text: str
    sizes: Mapping[str, int]
    in_tree: Any
    out_info: Any
    input_shardings: Any

    def as_text(self) -> str:
        """Return the text of the program."""
        return self.text

    def memory_analysis(self) -> Any:
        """Return the sizes that the compiler reports."""
        return types.SimpleNamespace(**self.sizes)


def folder() -> Path:
    """Return the folder of the programs: JAX's compilation cache, or the user's cache folder."""
    configured: str | None = getattr(jax.config, "jax_compilation_cache_dir", None)
    if configured and "://" not in configured:  # JAX also takes the address of a bucket
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmp"


def compile_or_load(lowered: Any, name: str) -> StoredProgram:
    """Return a compiled program from the folder, or compile it and write it there.

    Args:
      lowered: the lowered program.
      name: the name of the TPU or slice that it was lowered for.
    """
    key = _key(lowered, name)
    file = folder() / f"{key}.json.gz"
    stored = None if key is None else _read(file)
    if stored is None:
        if sys.stderr.isatty():
            print(
                f"compiling for {name}: this takes seconds for a layer and minutes for a train step. The program is "
                f"then kept in {file.parent}",
                file=sys.stderr,
            )
        stored = _facts(lowered.compile())
        if key is not None:
            _write(file, stored)
    mesh = AbstractMesh(tuple(stored["mesh"].values()), tuple(stored["mesh"]))
    shardings = [NamedSharding(mesh, PartitionSpec()) if is_used else None for is_used in stored["is_used"]]
    return StoredProgram(
        text=stored["text"],
        sizes=stored["sizes"],
        in_tree=lowered.in_tree,
        out_info=lowered.out_info,
        input_shardings=jax.tree.unflatten(lowered.in_tree, shardings),
    )


def _key(lowered: Any, name: str) -> str | None:
    """Return a name for everything that the compiled program depends on; None if its options are unknown.

    The names and the source lines of operations are part of it, because the tools show them. The lines that called the
    function are not part of it, so all tools read the same program.
    """
    packages = {package: importlib.metadata.version(package) for package in ("jaxlib", "libtpu")}
    program = HloProgram(lowered.as_text("hlo", debug_info=True))
    callers = {(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)}
    origins = []
    for instructions in program.computations.values():
        for instruction in instructions.values():
            lines = itertools.takewhile(lambda line: line not in callers, program.lines(instruction))
            origins.append((instruction.op_name, source_among(list(lines))))
    options = compiler_options_of(lowered)
    if options is None:
        return None
    settings = {setting: getattr(jax.config, setting, None) for setting in _SETTINGS}
    variables = {variable: os.environ.get(variable, "") for variable in _VARIABLES}
    parts = [_FORM, name, packages, sorted(options.items()), settings, variables, lowered.as_text(), origins]
    return "jaxmp-" + hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _facts(compiled: Any) -> dict[str, Any]:
    """Return the parts of a compiled program as plain values."""
    shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    mesh = mesh_of(compiled.input_shardings)
    return {
        "text": compiled.as_text(),
        "sizes": _sizes_of(compiled.memory_analysis()),
        "is_used": [sharding is not None for sharding in shardings],
        "mesh": {} if mesh is None else dict(mesh.shape),
    }


def _sizes_of(memory: Any) -> dict[str, int]:
    """Return the sizes of a program, with no more temporaries than at its memory peak.

    If a program has a loop, libtpu's size of the temporaries may be larger than all its buffers for them. Its peak also
    counts the memory of the core, so it may be larger than the other sizes together.
    """
    sizes = {name: int(getattr(memory, name)) for name in _SIZES}
    results = sizes["output_size_in_bytes"] - sizes["alias_size_in_bytes"]
    at_peak = int(memory.peak_memory_in_bytes) - sizes["argument_size_in_bytes"] - results
    if at_peak >= 0:
        sizes["temp_size_in_bytes"] = min(at_peak, sizes["temp_size_in_bytes"])
    return sizes


def _read(file: Path) -> dict[str, Any] | None:
    """Return the parts of a program in a file; None if there is no readable file."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") as opened:
            parts: dict[str, Any] = json.load(opened)
    except (OSError, EOFError, ValueError):
        return None
    return parts


def _write(file: Path, parts: dict[str, Any]) -> None:
    """Write a file in one step, so that another process never reads half of it.

    A full disk is not an error: the program is then compiled again the next time.
    """
    written = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(written, "wt", encoding="utf-8") as opened:
            json.dump(parts, opened)
        written.replace(file)
    except OSError:
        written.unlink(missing_ok=True)
