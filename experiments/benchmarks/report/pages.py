"""Write the figures of the README and the docs from experiments/results.

python -m experiments.benchmarks.report.pages

A page has the figures between two comments with the name of a block. :data:`BLOCKS` has the function that writes each
block. A block copies tables of the newest result, or computes a table from its JSON file, and states the device,
versions, date and command.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmarks import float8
from experiments.benchmarks.compile_only import tpu_report
from experiments.benchmarks.compile_only.sharded import ABOUT, ABOUT_SLICES
from experiments.benchmarks.gradient_sums import NOTE as SUMS_NOTE
from experiments.benchmarks.gradient_sums import sentence
from experiments.benchmarks.report import gpu_steps, predictions, rule_tables
from experiments.benchmarks.report.marked_text import write_marked
from experiments.benchmarks.train_step.results import Results
from experiments.report.json_files import numbers
from experiments.report.tables import markdown, percent
from jaxmp.base.gpus import GPUS
from jaxmp.base.tpus import TPUS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "experiments" / "results"
COMMAND = "python -m experiments.benchmarks.report.pages"
TPUS_IN_README = ("tpu_steps-v5e", "tpu_steps-v5e-bert", "tpu_steps-v5p", "tpu_steps-v6e")
"""The results in the README's table of TPUs. The page on TPUs has all results."""
FOR_MANY_GPUS = ("h200", "h100", "a100", "b200", "l4")
"""The GPUs in the table of models on many GPUs."""


class Result(NamedTuple):
    """A result of a benchmark: NAME.md and, unless it is the demo's, NAME.json beside it."""

    file: Path

    @property
    def facts(self) -> dict[str, str]:
        """Return the device, versions, date and command."""
        return dict(re.findall(r"^- (\w+): (.+)$", self.file.read_text(), flags=re.MULTILINE))

    @property
    def data(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return json.loads(self.file.with_suffix(".json").read_text())

    def tables(self) -> dict[str, str]:
        """Return the text below each heading with a table, by heading: the table and its notes."""
        parts = re.split(r"^#+ (.+)$", self.file.read_text(), flags=re.MULTILINE)
        return {heading: text.strip() for heading, text in zip(parts[1::2], parts[2::2], strict=True) if "|" in text}

    def origin(self, title: str = "") -> str:
        """Return a link to the result, and its device, versions, date and command.

        Args:
          title: the text of the link; empty for the name of the folder.
        """
        facts = self.facts
        device = facts["device"]
        if "target" in facts:
            device = f"compiled for {facts['target']} on {device}, not run"
        link = f"[{title or self.file.parent.name}]({self.file.relative_to(ROOT)})"
        return f"{link}: {device}; {facts['versions']}; {facts['date'][:10]}; `{facts['command']}`"


DEMO = Result(RESULTS / "demo" / "compare.md")


def all_of(name: str) -> list[Result]:
    """Return the results of a benchmark, the newest first."""
    results = [Result(file) for file in sorted(RESULTS.glob(f"{name}*/{name}.md"))]
    return sorted(results, key=lambda result: result.facts["date"], reverse=True)


def newest(name: str) -> Result:
    """Return the newest result of a benchmark."""
    return all_of(name)[0]


def only_table(text: str) -> str:
    """Return the table of a text in Markdown, without its notes."""
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def copied(name: str) -> str:
    """Return the first table of a benchmark's newest result, its notes, and where it comes from."""
    result = newest(name)
    return f"{next(iter(result.tables().values()))}\n\n{result.origin()}"


def gradient_sums_sentence() -> str:
    """Return the sentence on sums of gradients, with a link to their page."""
    return f"{sentence(newest('gradient_sums').data)} [Why, and other cases](docs/gradient_sums.md)."


def gradient_sums() -> str:
    """Return the picture and the tables of the errors of sums of gradients, for both half dtypes."""
    result = newest("gradient_sums")
    picture = result.file.with_suffix(".png").relative_to(ROOT)
    lines = [f"![Errors of the gradients of params, by case and method]({picture})"]
    for half, table in result.tables().items():
        lines += [f"*{half}*", only_table(table)]
    return "\n\n".join([*lines, SUMS_NOTE, result.origin().partition(": ")[2]])


def scaling_costs() -> list[tuple[str, dict[str, float]]]:
    """Return the share of time that each way of loss scaling adds to a step, by step."""
    costs = []
    for result in sorted(all_of("loss_scaling")):
        for step in result.data["results"]:
            added = {name: figures["ratio"][1] - 1 for name, figures in step["variants"].items()}
            costs.append((step["model"], added))
    return costs


def scaling_table() -> str:
    """Return a table of the time that loss scaling adds to a step."""
    ways = ("jaxmp.loss_scaling", "jmp.DynamicLossScale", "flax DynamicScale", "no scaling, again")
    rows = []
    for step, added in scaling_costs():
        rows.append((step, *(f"{100 * added[way]:+.2f} %" if way in added else "–" for way in ways)))
    return markdown(("step", "jaxmp", "jmp", "flax", "the same step again"), rows)


def demo_conclusion() -> str:
    """Return the sentences that the demo ended with."""
    return DEMO.file.read_text().splitlines()[2]


def step_results(row: str = "") -> dict[str, Result]:
    """Return the newest result with train steps of each model, all on the device that was measured last.

    Args:
      row: a row that the result must have measured beside torch.compile; empty for any result.
    """
    results, chosen = all_of("train_step"), dict[str, Result]()
    for result in results:
        data = result.data
        for model in data["models"]:
            has_row = not row or gpu_steps.relative(gpu_steps.read(model, data), row) is not None
            if has_row and result.facts["device"] == results[0].facts["device"]:
                chosen.setdefault(model, result)
    return {model: chosen[model] for model in gpu_steps.MODELS if model in chosen}


def steps(row: str = "") -> dict[str, Results]:
    """Return the measured train steps of each model, from the results that :func:`step_results` chooses."""
    return {model: gpu_steps.read(model, result.data) for model, result in step_results(row).items()}


def unchanged_sentence() -> str:
    """Return the sentences on autocast of code that nobody changed, with a link to the result."""
    results = dict.fromkeys(step_results(gpu_steps.UNCHANGED).values())
    links = ", ".join(f"[Record]({result.file.relative_to(ROOT)})" for result in results)
    return f"{gpu_steps.unchanged_sentence(steps(gpu_steps.UNCHANGED), device())} {links}".strip()


def device() -> str:
    """Return the device of the measured train steps."""
    return all_of("train_step")[0].facts["device"].removesuffix(" (gpu)")


def step_table() -> str:
    """Return the sentences on unchanged code, and the table of measured train steps."""
    title = "step time · peak memory, relative to torch.compile AMP in bfloat16 in the same run"
    return f"{unchanged_sentence()}\n\nA train step on {device()}: {title}.\n\n{gpu_steps.table(steps())}"


def goals_table() -> str:
    """Return the table of figures with their goals, and the memory saved if float32 is compiled too."""
    compiled, remat = newest("compile_only").data["results"], newest("remat").data["groups"]
    return gpu_steps.goals_table(steps(), compiled, remat)


def memory_sentence() -> str:
    """Return a sentence on the memory that bfloat16 saves, with the GPU that the steps were compiled for."""
    result = newest("compile_only")
    return gpu_steps.memory_sentence(steps(), result.data["results"], result.facts["target"])


def step_origins() -> str:
    """Return where the tables of train steps come from."""
    unchanged = step_results(gpu_steps.UNCHANGED).values()
    results = dict.fromkeys([*step_results().values(), *unchanged, newest("compile_only"), newest("remat")])
    return "\n\n".join([gpu_steps.recorded_peaks(), *(result.origin() for result in results)])


def all_files() -> str:
    """Return links to all results but those of the demo and of loss scaling, without smoke tests."""
    lines = []
    for result in map(Result, sorted(RESULTS.glob("*/*.md"))):
        name = result.file.parent.name
        if name != "demo" and not name.startswith("loss_scaling") and "--smoke" not in result.facts.get("command", ""):
            lines.append(f"- [{name}]({result.file.relative_to(ROOT)})")
    return "\n".join(lines)


def sharding() -> str:
    """Return the table of the GPUs that a model of 7 B needs."""
    rows = []
    for row in newest("sharded").data["rows"]:
        if (row["setting"]["size"], row["way"]) == ("7B", "linen"):
            cards = [name.upper() for name in FOR_MANY_GPUS if row["peak"] <= 0.9 * GPUS[name].memory_bytes]
            figures = (f"{row['peak'] / 2**30:.1f}", f"{row['wire'] / 1e9:.1f}")
            rows.append((f"{row['gpus']} ({row['topology']})", *figures, ", ".join(cards) or "none"))
    columns = ("GPUs", "GiB on each", "GB that each sends in a step", "GPUs with enough memory (10 % stay free)")
    return markdown(columns, rows)


def sharding_sizes() -> str:
    """Return the table of all models that were compiled for many GPUs."""
    result = newest("sharded")
    return "\n\n".join([only_table(result.tables()["Each GPU"]), ABOUT, result.origin()])


def gpus() -> str:
    """Return the table of GPUs."""
    rows = []
    for name, gpu in GPUS.items():
        rates = [gpu.float32, gpu.tensorfloat32, gpu.half, gpu.float8]
        cells = ["–" if rate is None else f"{rate:g}" for rate in rates]
        rows.append((f"`{name}`", gpu.device_kind, f"{gpu.memory_gib}", f"{gpu.bandwidth_gb:,}", *cells))
    columns = ("name", "GPU", "memory, GiB", "memory, GB/s", "TFLOP/s: float32", "TF32", "half", "float8")
    return markdown(columns, rows, left=2)


def tpus() -> str:
    """Return the table of TPUs."""
    rows = []
    for name, tpu in TPUS.items():
        rates = [tpu.bfloat16, tpu.float8, tpu.int8]
        cells = ["–" if rate is None else f"{rate:g}" for rate in rates]
        memory = f"{tpu.memory_gib:g}", f"{tpu.bandwidth_gb:,}"
        rows.append((f"`{name}`", tpu.device_kind, *memory, *cells, f"{tpu.link_gb:,}", f"{tpu.axes}"))
    columns = (
        "name",
        "TPU",
        "memory, GiB",
        "memory, GB/s",
        "TFLOP/s: bfloat16",
        "float8",
        "int8",
        "links, GB/s",
        "axes",
    )
    return markdown(columns, rows, left=2)


def tpu_steps() -> str:
    """Return the tables of train steps compiled for TPUs, by model and TPU, each with its origin."""
    texts = []
    for result in reversed(all_of("tpu_steps")):
        for heading, text in result.tables().items():
            texts.append(f"**{heading}, {result.facts['target']}**\n\n{text}")
        texts.append(result.origin())
    return "\n\n".join([*texts, tpu_report.ABOUT])


def tpu_summary() -> str:
    """Return a table of autocast of unchanged code on TPUs, relative to bfloat16 by hand."""
    rows = []
    shown = [result for result in all_of("tpu_steps") if result.file.parent.name in TPUS_IN_README]
    for result in reversed(shown):
        for of_model in result.data["results"]:
            model, _, _ = of_model["model"].partition(",")  # without its sizes
            rows.append((result.facts["target"], model, *tpu_report.of_unchanged_code(of_model)))
    return (
        "`jaxmp.autocast` of unchanged code, compiled for a TPU, not run, relative to bfloat16 by hand; the compiler "
        f"estimates the cycles:\n\n{markdown(('TPU', 'model', 'cycles', 'memory'), rows, left=2)}\n\n"
        "[Sizes, more rows, and pods](docs/tpus.md#train-steps-compiled-for-a-tpu)"
    )


def tpu_slices() -> str:
    """Return the table of models compiled for slices of TPUs."""
    result = newest("tpu_slices")
    return "\n\n".join([only_table(result.tables()["Each TPU"]), ABOUT_SLICES, result.origin()])


def float8_on_tpu() -> str:
    """Return the table of float8 compiled for a TPU, without the columns that only GPUs have."""
    results = [result for result in all_of("float8") if "TPU" in result.facts["target"]]
    columns = ("float8 of products", "million cycles", "speed-up by cycles", "peak MiB")
    rows = []
    for case in [case for result in results for case in result.data["results"]]:
        for way, figures in case["rows"].items():
            cells = [f"{figures[column]:{float8.FIGURES[column]}}" for column in columns]
            rows.append((f"{case['part']}, {case['size']}", f"{float8.tokens_of(case):,}", way, *cells))
    table = markdown(("part, size", "tokens", "way", *columns), rows, left=3)
    return "\n\n".join([table, *(result.origin() for result in results)])


def real_libraries() -> str:
    """Return the table of the errors of gradients under autocast, by program."""
    result = newest("real_libraries")
    programs: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result.data["programs"]:
        programs.setdefault(f"{row['library']}: {row['program']}", {})[row["half"]] = row
    verdicts = {title: {row["verdict"] for row in rows.values()} - {""} for title, rows in programs.items()}
    missed = [title for title, verdict in verdicts.items() if "worse than T" in verdict]
    ill = [title for title, verdict in verdicts.items() if "ill-conditioned" in verdict and title not in missed]
    text = f"{len(programs) - len(missed) - len(ill)} of {len(programs)} programs meet the goal."
    for word, titles in (("Ill-conditioned", ill), ("Missed", missed)):
        text += f" {word}: {'; '.join(titles)}." if titles else ""
    rows = []
    for title, of_program in programs.items():
        notes = f" ({', '.join(sorted(verdicts[title]))})" if verdicts[title] else ""
        errors = [
            percent(of_program[half][way][1]) for half in ("bfloat16", "float16") for way in ("autocast", "T", "N")
        ]
        rows.append((title + notes, *errors, f"{100 * of_program['bfloat16']['half_share']:.0f} %"))
    references = ("half products", "all half")
    of_halves = ("bfloat16: autocast", *references, "float16: autocast", *references)
    columns = ("program", *of_halves, "FLOPs in half under autocast")
    origin = result.origin("The full record").replace("): ", "), with the errors of the losses: ", 1)
    return f"{text}\n\n{markdown(columns, rows)}\n\n{origin}"


def rules_and_memory() -> str:
    """Return the tables of the rules of autocast: the programs in which each matters, and memory without it."""
    errors, memory = newest("ablation"), newest("ablation_memory")
    data = numbers(errors.data)
    texts = [rule_tables.without_a_graph(data["programs"]), rule_tables.rules(data)]
    return "\n\n".join(
        [*texts, rule_tables.memory(memory.data["rows"]), errors.origin("Errors"), memory.origin("Memory")]
    )


def roofline() -> str:
    """Return the table of predicted and measured step times, for an H200."""
    result = newest("compile_only")
    (prediction,) = predictions.predictions(result.data["results"])
    _, _, text = prediction.markdown().partition("\n\n")
    return f"{text}\n{result.origin()}"


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "results": lambda: "\n\n".join(
            [unchanged_sentence(), gradient_sums_sentence(), gpu_steps.sentence(steps(), device()), memory_sentence()]
        ),
        "tpus": tpu_summary,
    },
    "docs/measured.md": {
        "sums": gradient_sums_sentence,
        "origin of sums": lambda: newest("gradient_sums").origin(),
        "steps": step_table,
        "goals": goals_table,
        "origin of steps": step_origins,
        "demo": demo_conclusion,
        "pysource": lambda: only_table(DEMO.tables()["pysource: result"]),
        "origin of demo": lambda: DEMO.origin().partition(": ")[2],
        "loss scaling": scaling_table,
        "origin of loss scaling": lambda: "\n\n".join(result.origin() for result in sorted(all_of("loss_scaling"))),
        "files": all_files,
    },
    "docs/gradient_sums.md": {"results": gradient_sums},
    "docs/sharding.md": {"results": sharding, "sizes": sharding_sizes},
    "docs/tools/roofline.md": {"results": roofline},
    "docs/tools/index.md": {"gpus": gpus},
    "docs/tpus.md": {"tpus": tpus, "steps": tpu_steps, "slices": tpu_slices},
    "docs/real_libraries.md": {"results": real_libraries, "rules": rules_and_memory},
    "docs/tools/tune.md": {"results": lambda: copied("tune")},
    "docs/concepts/float8.md": {"tpu": float8_on_tpu},
    "docs/concepts/formats.md": {"results": lambda: copied("matmul_precision")},
}
"""The blocks of each page, and the function that returns the text of each block.

Links in a text start at the root of the repository.
"""


def text_of(page: str, block: str) -> str:
    """Return the text of a block, with links from its page."""
    folder = Path(page).parent
    text = BLOCKS[page][block]()
    return re.sub(
        r"\]\(((?:docs|experiments)/[^)]*)\)", lambda match: f"]({os.path.relpath(match[1], folder)})", text
    ).strip()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    for page, blocks in BLOCKS.items():
        for block in blocks:
            write_marked(ROOT / page, block, COMMAND, text_of(page, block))
