"""Compare a step under autocast with half precision by hand and with float32.

python -m experiments.benchmarks.autocast --models gpt2 lstm

A step computes the loss and its gradients, and updates with AdamW. The models are those of
experiments/benchmarks/models/by_hand.py. Steps are warmed up, their state is donated, and the variants take turns. The
programs are compared too, both as JAX lowers them and as XLA compiles them. On a CPU only the lowered programs count,
because XLA's CPU compiler computes bfloat16 products in float32. The run folder holds autocast.md and autocast.json.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import optax

import jaxmp
from experiments.benchmarks.measure import programs
from experiments.benchmarks.measure.turns import Prepared, compared
from experiments.benchmarks.models import by_hand
from experiments.benchmarks.models.workloads import FULL, Sizes, Workload, workload
from experiments.benchmarks.report.goals import Goal, share
from experiments.benchmarks.shared import records, scaled_steps
from experiments.measure import timing
from experiments.report.progress import Progress
from experiments.report.tables import Table, times
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp.inspect.compiled import compiling, hlo

BY_HAND, AUTOCAST = "by hand", "autocast"
VARIANTS = (BY_HAND, "float32", "by hand, again", AUTOCAST)
ON_GPU = {
    "gpt2": Sizes(16, 1024, vocabulary=50304), "bert": Sizes(64, 512, vocabulary=50304),
    "lstm": Sizes(64, 256, vocabulary=50304), "resnet": dataclasses.replace(FULL["resnet50"], batch_size=64),
}  # fmt: skip
_SMALL = Sizes(2, 64, layers=2, width=64, vocabulary=512)
ELSEWHERE = {"gpt2": _SMALL, "bert": _SMALL, "lstm": _SMALL, "resnet": Sizes(2, 32, 2, 16, 10)}
TIME_GOAL, MEMORY_GOAL = 1.01, 1.02
COLUMNS = ("step", "ms", "quartiles", "time ratio", "quartiles of the ratio", "compiled MiB", "memory ratio")
PROGRAM_COLUMNS = ("program", "products by operand dtypes", "casts", "round trips")
INTRO = (
    "A ratio is the time of a step divided by the time by hand in the same round. The median over the rounds is "
    "shown. `by hand, again` is the step by hand, compiled a second time. Memory is the arguments, results and "
    "temporaries of the compiled step."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Sized):
    """Flags of the benchmark."""

    models: tuple[Literal["gpt2", "bert", "resnet", "lstm"], ...] = ("gpt2", "bert", "resnet", "lstm")
    """Models to time. A ResNet's only size flags are --batch-size and --layers (blocks per stage)."""
    policy: Literal["mixed_bfloat16", "mixed_float16"] = "mixed_bfloat16"
    """The policy of autocast. Its compute dtype is also the dtype of the model by hand."""


def case_of(name: str, config: Config) -> Workload:
    """Return a model with the sizes of the flags."""
    if name == "resnet":
        config = dataclasses.replace(config, sequence=0, width=0, vocabulary=0)
    return workload("resnet50" if name == "resnet" else name, config.sizes(ON_GPU[name], ELSEWHERE[name]))


def step_of(case: Workload, variant: str, policy: str) -> tuple[Any, Any]:
    """Return the functions ``start`` and ``step`` of a variant.

    ``start()`` returns a state. ``step(state, batch)`` returns ``(state, loss)``; it is jitted and donates its state.
    """
    model = by_hand.build(case, jaxmp.get_policy(policy).compute_dtype if variant.startswith(BY_HAND) else None)
    loss_fn = by_hand.loss_fn_of(model)
    if variant == AUTOCAST:
        loss_fn = jaxmp.autocast(loss_fn, policy)
    start, step = scaled_steps.no_scaling(loss_fn, optax.adamw(3e-4), functools.partial(by_hand.init, case, model))
    return start, jax.jit(step, donate_argnums=0)


def differences(by_hand: dict[str, dict[str, Any]], autocast: dict[str, dict[str, Any]]) -> list[str]:
    """Describe where autocast's programs are worse than the programs by hand.

    The list is empty if no program is worse.
    """
    faults = []
    # XLA's CPU compiler adds its own casts around operations that it cannot do in half precision.
    for stage in by_hand if jax.default_backend() != "cpu" else ("lowered",):
        hand, auto = by_hand[stage], autocast[stage]
        if words := programs.difference(auto["products"], hand["products"]):
            faults.append(f"{stage}: {words}")
        if auto["round_trips"] > hand["round_trips"]:
            faults.append(f"{stage}: {auto['round_trips']} casts undo the cast before, by hand {hand['round_trips']}")
    return faults


def measure(name: str, config: Config, progress: Progress) -> dict[str, Any]:
    """Compile and time every variant of a model's step."""
    case = case_of(name, config)
    batch = jax.device_put(case.random_batch())

    def ready(variant: str) -> Prepared:
        start, step = step_of(case, variant, config.policy)
        lowered = step.lower(jax.eval_shape(start), case.batch)
        compiled = lowered.compile()
        texts = {"lowered": lowered.as_text("hlo"), "compiled": compiled.as_text()}
        counts = {stage: programs.counts(hlo.HloProgram(text)) for stage, text in texts.items()}
        about = {"bytes": compiling.peak_bytes(compiled), "programs": counts}
        turn = timing.turn(compiled, start(), batch)
        return Prepared(turn, lambda: float(turn()[1]), about=about)

    make = {variant: functools.partial(ready, variant) for variant in VARIANTS}
    rows = compared(make, config.rounds, config.block_ms, functools.partial(progress.advance, title=name))
    if bad := [f"{variant}: {row['error']}" for variant, row in rows.items() if "error" in row]:
        raise FloatingPointError(f"{', '.join(bad)}: the times mean nothing")
    counts = {variant: row.pop("programs") for variant, row in rows.items()}
    return {
        "model": f"{case.text}, {case.sizes.vocabulary} {'classes' if case.images else 'tokens'}",
        "policy": str(jaxmp.get_policy(config.policy)),
        "programs": counts,
        "differences": differences(counts[BY_HAND], counts[AUTOCAST]),
        "variants": rows,
    }


def table(result: dict[str, Any]) -> Table:
    """Return a table with a row for each variant, and the goals."""
    rows, base = [], result["variants"][BY_HAND]["bytes"]
    for variant, row in result["variants"].items():
        memory_ = (f"{row['bytes'] / 2**20:.1f}", f"{row['bytes'] / base:.4f}") if base else ("", "")
        rows.append((variant, *times(row), *memory_))
    return Table(f"{result['model']}: a step", COLUMNS, rows, notes=tuple(goals(result)))


def goals(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each goal that says whether it is met."""
    hand, auto = result["variants"][BY_HAND], result["variants"][AUTOCAST]
    judged = [
        Goal("time", "time / by hand's", auto["ratio"][1], TIME_GOAL, form=".4f"),
        Goal("memory", "memory of the compiled step / by hand's", share(auto["bytes"], hand["bytes"]), MEMORY_GOAL),
    ]
    behind = "; ".join(result["differences"])
    same = "met: the same products in the same dtypes as by hand, and no more casts that undo the cast before"
    return [*(goal.sentence() for goal in judged), f"NOT MET: the programs differ: {behind}" if behind else same]


def program_table(result: dict[str, Any]) -> Table:
    """Return a table with a row for each program: its products and its casts."""
    rows = [
        (
            f"{variant}, {stage}",
            *(programs.words(program[what]) for what in ("products", "casts")),
            str(program["round_trips"]),
        )
        for variant, stages in result["programs"].items()
        for stage, program in stages.items()
        if variant in ("float32", BY_HAND, AUTOCAST)
    ]
    return Table(f"{result['model']}: the programs", PROGRAM_COLUMNS, rows)


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        for name in config.models:
            case_of(name, config)
        folder = records.folder_of("autocast", config)
    with Progress("autocast", len(config.models) * config.rounds) as progress:
        results = [measure(name, config, progress) for name in config.models]
    where = {**environment(), "policy": results[0]["policy"]}
    tables = [make(result) for result in results for make in (table, program_table)]
    title = "A training step under autocast, by hand and in float32"
    records.record(folder, "autocast", title, where, tables, {"results": results}, [INTRO])
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
