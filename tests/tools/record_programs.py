"""Record the programs, plans and reports of jaxmp, to find out whether a change of the library changes them.

    python tests/tools/record_programs.py before     # on the old commit
    python tests/tools/record_programs.py after --compare before

Each recording is a text file: the rewritten program in a canonical text, and the plan, or the reports of the inspection
tools for a train step. The second command lists the recordings that differ, with the first line that differs. Recorded
are the cases of autocast_zoo.py between two products, with their gradients; the layers and models of gradient_zoo.py;
train steps with accumulation, recomputation, float8 and a mesh; and, if their libraries are installed, the programs of
the benchmark `real_libraries`. Keep recordings outside of the repository.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAXMP_FLOAT8", "emulate")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import argparse
import functools
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import autocast_zoo
import gradient_zoo
import jax
import jax.numpy as jnp
import mesh_steps
from autocast_tools import in_turn

import jaxmp
from experiments.benchmarks.real_libraries.registry import programs
from jaxmp.sharding import Sharding

PARTS = ("cases", "layers", "models", "steps", "libraries")


def text_of(fun: Callable[..., Any], *args: Any) -> str:
    """Return the traced program as text, without addresses of objects and names of files."""
    text = str(jax.make_jaxpr(fun)(*args))
    return re.sub(r"0x[0-9a-f]+|/\S+\.py:\d+", "", text)


def of_function(fun: Callable[..., Any], policy: str, *args: Any) -> str:
    """Return the program and the plan of a function under autocast."""
    half = jaxmp.autocast(fun, policy)
    plan = jaxmp.cast_plan(fun, policy)(*args)
    return f"{text_of(half, *args)}\n\n{plan}\n"


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield functions between two products, and their gradients, under autocast."""
    for part in autocast_zoo.PARTS:
        table = autocast_zoo.table(part)
        for name, policy in in_turn(table):
            case = table[name]
            for kind, make in (("function", autocast_zoo.between_products), ("gradient", autocast_zoo.gradient)):
                record = functools.partial(of_function, make(case), policy, *autocast_zoo.arguments(case))
                yield f"{part} {name} {kind}", record


def models(functions: dict[str, Callable[..., Any]]) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield Linen and NNX models under a policy, and their gradients."""
    for name, make in functions.items():

        def record(make: Callable[..., Any] = make) -> str:
            function = make("mixed_bfloat16")
            plain = make()
            loss = gradient_zoo.loss(function.apply)
            of_policy = text_of(jax.value_and_grad(loss), function.params, function.x)
            return f"{of_policy}\n\n{of_function(plain.apply, 'mixed_bfloat16', plain.params, plain.x)}"

        yield name, record


def report_of(step: Any, state: Any, batch: Any, is_run: bool) -> str:
    """Return the program of a step and its audit; if ``is_run`` is true, also the reports that need a run."""
    reports = [text_of(step, state, batch), jaxmp.inspect.audit(step)(state, batch)]
    if is_run:
        reports += [jaxmp.inspect.numerics(step)(state, batch), jaxmp.inspect.memory(step)(state, batch)]
    return "\n\n".join(map(str, reports))


def steps() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield train steps with every option that changes the program."""
    model, loss_fn = mesh_steps.MODEL, mesh_steps.linen_loss()
    batch = jnp.asarray(mesh_steps.tokens())

    def step_of(policy: str, is_run: bool = False, **options: Any) -> str:
        module = jaxmp.linen.apply_policy(model, policy)
        state = jaxmp.TrainState.create(params=mesh_steps.linen_params(model), tx=mesh_steps.tx_of())
        step = jaxmp.make_train_step(mesh_steps.linen_loss(module), donate=False, **options)
        return report_of(step, state, batch, is_run)

    def autocast_step(policy: str, **options: Any) -> str:
        state = jaxmp.TrainState.create(params=mesh_steps.linen_params(model), tx=mesh_steps.tx_of())
        step = jaxmp.make_train_step(loss_fn, policy=policy, donate=False, **options)
        return report_of(step, state, batch, is_run=False)

    def mesh_step(axes: dict[str, int], make_params: Callable[[], Any], loss: Callable[..., Any]) -> str:
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
        sharding = Sharding(mesh, mesh_steps.specs_of(make_params, mesh))
        state = jaxmp.TrainState.create_sharded(make_params, mesh_steps.tx_of(), sharding)
        step = jaxmp.make_train_step(loss, policy="mixed_bfloat16", sharding=sharding, donate=False)
        program = text_of(step, state, batch)
        return f"{program}\n\n{jaxmp.inspect.audit(step)(state, batch)}"

    for policy in ("mixed_bfloat16", "mixed_float16", "mixed_float8"):
        yield f"step policy {policy}", lambda policy=policy: step_of(policy)
        yield f"step autocast {policy}", lambda policy=policy: autocast_step(policy)
    yield "step accumulation", lambda: step_of("mixed_float16", is_run=True, accumulate_steps=2)
    yield "step accumulation autocast", lambda: autocast_step("mixed_bfloat16", accumulate_steps=2)
    yield "mesh gpt2", lambda: mesh_step({"fsdp": 4}, mesh_steps.linen_params, loss_fn)
    yield "mesh stacked", lambda: mesh_step({"fsdp": 4}, mesh_steps.stacked_params, mesh_steps.stacked_loss)


def libraries() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the programs of real libraries and of papers, with their gradients."""
    for program in programs():
        if not program.is_installed:
            continue

        def record(program: Any = program) -> str:
            loss, params = program.make()
            gradient = jax.value_and_grad(jaxmp.autocast(loss, "mixed_bfloat16"))
            return f"{text_of(gradient, params)}\n\n{jaxmp.cast_plan(loss, 'mixed_bfloat16')(params)}"

        yield f"{program.library} {program.name}", record


def recordings(parts: list[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each recording, and a function that returns its text."""
    makers = {
        "cases": cases,
        "layers": lambda: models(gradient_zoo.LAYERS),
        "models": lambda: models(gradient_zoo.MODELS),
        "steps": steps,
        "libraries": libraries,
    }
    for part in parts:
        for name, record in makers[part]():
            yield f"{part} {name}", record


def file_name(name: str) -> str:
    """Return a file name for a recording. Different names have different file names."""
    return urllib.parse.quote(name, safe=" ,") + ".txt"


def first_difference(old: str, new: str) -> str:
    """Return the first line that differs, in both texts."""
    lines = zip((*old.splitlines(), "<end>"), (*new.splitlines(), "<end>"), strict=False)
    before, after = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
    return f"    - {before.strip()[:150]}\n    + {after.strip()[:150]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder for the recordings")
    parser.add_argument("--compare", type=Path, help="a folder with earlier recordings")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to record (default: all)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    count, changed = 0, 0
    for name, record in recordings(options.parts):
        try:
            text = record()
        except Exception as error:  # an error is a result, too
            text = f"{type(error).__name__}: {error}"
        (options.folder / file_name(name)).write_text(text)
        count += 1
        old = options.compare / file_name(name) if options.compare else None
        if old is not None and old.is_file() and old.read_text() != text:
            changed += 1
            print(f"{name}\n{first_difference(old.read_text(), text)}", flush=True)
    print(f"{count} recordings in {options.folder}" + (f", {changed} differ" if options.compare else ""))


if __name__ == "__main__":
    main()
