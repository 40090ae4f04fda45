"""Memory, products, kernels and bytes of whole train steps on a GPU that is not there.

python -m experiments.benchmarks.compile_only --models gpt2

XLA compiles for a GPU that it is only told about, so that all but time can be known on any machine: each model's train
step (forward, backward, clipping, AdamW, loss scaling, its state donated) in float32, by hand in half, under jaxmp's
policies and autocast, with what its backward pass may compute again. The models of the last two are those of the
experiments, written with jaxmp for half precision: autocast is compared with the policy there, and with dtypes by hand,
on code that nobody prepared, in benchmarks.autocast. A row has the temporaries and the peak (arguments, results that
reuse none of them, temporaries), the dtypes of all products, the share of the FLOPs that tensor cores do in half, the
kernels that are launched and the bytes that those move which are no products. Peaks are compared with the one that
torch.compile under AMP had on an H200. The run folder holds compile_only.md, compile_only.json and compile_only.png. It
needs the packages of the extra compile-only, and no GPU.
"""

from __future__ import annotations

import dataclasses
import json
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import rich.console
import tyro

import jaxmp
from experiments.benchmarks.compile_only import report
from experiments.benchmarks.shared import hlo, hlo_memory, kept, scaled_steps, targets
from experiments.benchmarks.shared.workloads import FULL, NAMES, SMOKE, Name, Sizes, Workload, workload
from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import Row, rows_of
from experiments.measure import flops, memory
from experiments.measure.environment import environment
from experiments.models import attention
from experiments.report.progress import Progress
from experiments.training import cli
from experiments.training.runs import run_folder, write_json


@dataclasses.dataclass(frozen=True)
class Variant(Row):
    """A row of benchmarks.train_step, or an ordinary optax step with ``checks``: what loss scaling looks at there."""

    checks: Literal["", "gradients", "updates"] = ""


VARIANTS: dict[str, Variant] = {
    "hand-fp32": Variant("by hand, fp32", "hand", "fp32"),
    "hand-bf16": Variant("by hand, bf16", "hand", "bf16"),
    "jaxmp-fp32": Variant("jaxmp, fp32", "jaxmp", "fp32"),
    "jaxmp-tf32": Variant("jaxmp, TF32", "jaxmp", "tf32"),
    "jaxmp-bf16": Variant("jaxmp, bf16", "jaxmp", "bf16"),
    "autocast-bf16": Variant("jaxmp.autocast, bf16", "autocast", "bf16"),
    "jaxmp-bf16-remat": Variant("jaxmp, bf16, remat of all but attention", "jaxmp", "bf16", remat="attention"),
    "jaxmp-bf16-remat-dots": Variant("jaxmp, bf16, remat of all but products", "jaxmp", "bf16", remat="dots"),
    "jaxmp-bf16-remat-full": Variant("jaxmp, bf16, remat of all", "jaxmp", "bf16", remat="full"),
    "jaxmp-fp16-unscaled": Variant("jaxmp, fp16, no scaling", "jaxmp", "fp16"),
    "jaxmp-fp16-gradients": Variant("jaxmp, fp16, scaling, gradients checked", "jaxmp", "fp16", checks="gradients"),
    "jaxmp-fp16-updates": Variant("jaxmp, fp16, scaling, updates checked too", "jaxmp", "fp16", checks="updates"),
    "jaxmp-fp16": Variant("jaxmp, fp16, make_train_step", "jaxmp", "fp16", scaled=True),
}
"""Every row, by the name that ``--variants`` takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark."""

    models: tuple[Name, ...] = NAMES
    """Models to compile."""
    variants: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ()
    """Rows to compile, among hand-fp32, hand-bf16, jaxmp-fp32, jaxmp-tf32, jaxmp-bf16, autocast-bf16, jaxmp-bf16-remat,
    jaxmp-bf16-remat-dots, jaxmp-bf16-remat-full, jaxmp-fp16-unscaled, jaxmp-fp16-gradients, jaxmp-fp16-updates and
    jaxmp-fp16. (default: all)"""
    target: Literal["h200", "h100", "a100"] = "h200"
    """GPU to compile for."""
    target_config: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """File with the description of another GPU, the text form of XLA's GpuTargetConfigProto, in place of --target.
    What is not for the H200 is not compared with torch."""
    layers: int = 0
    """Blocks of a transformer; 0 for 12. With fewer nothing is compared with torch."""
    top: int = 0
    """Largest buffers to list that are alive when most memory is filled."""
    hlo: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also write each compiled step's HLO."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on in --run-dir, for the same GPU and with the same versions: what its compile_only.json has is kept, and not
    compiled again."""
    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, to see it run; nothing is compared with torch."""
    run_dir: cli.Folder = None
    """Folder to write to. (default: runs/compile_only-TIME)"""


def sizes_of(name: Name, config: Config) -> Sizes:
    """A model's sizes by the flags."""
    sizes = (SMOKE if config.smoke else FULL)[name]
    return dataclasses.replace(sizes, layers=config.layers) if config.layers and name != "resnet50" else sizes


def step_of(case: Workload, variant: Variant) -> tuple[Any, Any]:
    """``start() -> state`` and ``step(state, batch)``, not yet jitted; the state is to be donated."""
    if not variant.checks:
        return jax_steps.train_step(case, variant)
    model = jaxmp.linen.apply_policy(case.model, jax_steps.POLICIES[variant.precision])
    loss_fn = case.loss_fn(model)
    return scaled_steps.with_jaxmp(loss_fn, jax_steps.optimizer(), case.init, variant.checks == "updates")


def measure(case: Workload, variant: Variant, device: Any, top: int = 0) -> tuple[dict[str, Any], str]:
    """What is to be known of a variant's step on ``device``, and its program."""
    start, step = step_of(case, variant)
    started = time.perf_counter()
    with attention.implementation("cudnn"):
        state = targets.on(device, jax.eval_shape(start))
        batch = targets.on(device, case.batch)
        counted = flops.count(step, state, batch)
        lowered = jax.jit(step, donate_argnums=0).trace(state, batch).lower(lowering_platforms=("cuda",))
    traced = time.perf_counter()
    compiled = lowered.compile(compiler_options=targets.COMPILER_OPTIONS)
    text = compiled.as_text()
    program = hlo.Program(text)
    for dtype, attended in program.attention_flops().items():
        name = {"bf16": "bfloat16", "f16": "float16"}[dtype]
        counted[name] = counted.get(name, 0) + int(attended)
    traffic, layout = program.traffic()
    row = {
        "label": variant.label,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "peak": memory.of_compiled(compiled),
        "products": dict(program.products()),
        "flops": counted,
        "half": sum(counted.get(name, 0) for name in ("bfloat16", "float16")) / sum(counted.values()),
        "launches": program.launches(),
        "traffic": traffic,
        "layout": layout,
        "seconds": {"trace": traced - started, "compile": time.perf_counter() - traced},
    }
    if top:
        row["buffers"] = [(each.bytes, each.array, each.made_by) for each in hlo_memory.peak(program)[:top]]
    return row, text


def earlier_run(file: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """The ``"environment"`` and the ``"results"`` that an earlier run wrote to ``file``.

    Raises:
      ValueError: it was for another GPU, with other versions or of other sizes, or the file is no result of a run.
    """
    try:
        earlier = json.loads(file.read_text())
        there = {**earlier["environment"], "smoke": any(result.get("smoke") for result in earlier["results"])}
        there = {name: there[name] for name in setting}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no result of a run ({error!r}); remove it, and all is compiled anew") from error
    kept.require_alike(file, setting, there)
    return earlier


def write(folder: Path, where: dict[str, str], results: list[dict[str, Any]]) -> None:
    """compile_only.json, .md and .png, which always have the same rows, date and command."""
    write_json(folder / "compile_only.json", {"environment": where, "results": results})
    report.write(folder, where, results)


def description_of(config: Config) -> tuple[str, tuple[int, int, int]]:
    """The GPU's description, and the cuDNN that its attentions are for."""
    target = targets.TARGETS[config.target]
    text = config.target_config.read_text() if config.target_config else target.text()
    return text, target.cudnn


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        cli.require("--layers", config.layers, 0)
        cli.require("--top", config.top, 0)
        cli.require("the number of --models", len(config.models), 1)
        chosen = {name: rows_of(name, config.variants, VARIANTS, "--variants") for name in config.models}
        if not any(chosen.values()):
            raise ValueError(f"--variants {' '.join(config.variants)} are not of --models {' '.join(config.models)}")
        description, cudnn = description_of(config)
        try:
            device = targets.device_of(description)
        except ModuleNotFoundError as error:
            cli.fail(str(error))
        folder = run_folder("compile_only", config.run_dir)
        packages = [name for name in ("jax-cuda13-plugin", "nvidia-cuda-nvcc") if _installed(name)]
        where = {"target": device.device_kind, **environment(tuple(packages))}
        earlier: dict[str, Any] = {"environment": where, "results": []}
        if config.resume and (file := folder / "compile_only.json").exists():
            earlier = earlier_run(
                file, {"target": where["target"], "versions": where["versions"], "smoke": config.smoke}
            )
    cases = {name: workload(name, sizes_of(name, config)) for name, variants in chosen.items() if variants}
    by_model = {result["model"]: result for result in earlier["results"]}  # all of them, asked for or not
    for name, case in cases.items():
        full = case.sizes == FULL[name] and device.device_kind == targets.TARGETS["h200"].name
        by_model.setdefault(
            case.text, {"name": name, "model": case.text, "smoke": config.smoke, "full": full, "variants": {}}
        )
    results = sorted(by_model.values(), key=lambda result: NAMES.index(result["name"]))
    missing = [
        (by_model[cases[name].text], key, variant)
        for name in cases
        for key, variant in chosen[name].items()
        if key not in by_model[cases[name].text]["variants"]
    ]
    where = kept.joined([earlier["environment"], where]) if missing else earlier["environment"]
    with Progress("compile_only", len(missing)) as progress, targets.with_cudnn(cudnn):
        for result, key, variant in missing:
            name, rows = result["name"], result["variants"]
            progress.advance(0, f"compiling {key}", name)
            rows[key], text = measure(cases[name], variant, device, config.top)
            result["variants"] = {each: rows[each] for each in VARIANTS if each in rows}
            write(folder, where, results)
            if config.hlo:
                (folder / f"{name}-{key}.hlo.txt").write_text(text)
            progress.advance(1, f"{key}: {rows[key]['peak'] / 2**20:,.0f} MiB", name)
    if not missing:
        write(folder, where, results)
    console = rich.console.Console()
    report.show(console if console.is_terminal else rich.console.Console(width=200), where, results)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
    return {"environment": where, "results": results}


def _installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False
