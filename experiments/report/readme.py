"""Copy measured figures into the README and seven pages of docs.

The figures come from experiments/results, and are written between two markers in each file.

python -m experiments.report.readme

- README.md: a sentence each on the errors of summed gradients, train steps on a GPU, and the cost of loss scaling
- docs/measured.md: all results and the tables of :mod:`experiments.report.step_tables`, with the device, versions,
  date and command of each
- docs/gradient_sums.md: the errors of summed gradients
- docs/sharding.md: models compiled for many GPUs
- docs/tools/roofline.md: step times predicted by the roofline model, beside measured times
- docs/tools/index.md: the table of GPUs
- docs/real_libraries.md: the errors of autocast in programs of real libraries, and the programs that need each rule
- docs/tools/tune.md: the policies that tune finds
- docs/concepts/formats.md: the errors of float32 products by precision
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from experiments.benchmarks.compile_only.sharded import ABOUT
from experiments.benchmarks.gradient_sums import NOTE, sentence
from experiments.benchmarks.tune import NOTE as TUNE_NOTE
from experiments.report import ablation_table, headline, predictions, step_tables
from experiments.report.marked_text import write_marked
from experiments.report.tables import percent
from jaxmp.base.gpus import GPUS

ROOT = Path(__file__).resolve().parents[2]
MEASURED = "How it was measured"
COMMAND = "python -m experiments.report.readme"
STEP_TITLE = ": ms a step"
"""The end of the title of a table of loss scaling; the step's name comes before it."""
FOR_MANY_GPUS = ("h200", "h100", "a100", "b200", "l4")
"""The GPUs in the table of models on many GPUs."""


def sections(file: Path) -> dict[str, str]:
    """Return the text below each heading of a Markdown file, by heading."""
    parts = re.split(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table(text: str) -> str:
    """Return the table in ``text``, without the lines around it."""
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def facts(text: str) -> str:
    """Return the device, versions, date and command in one line."""
    fields = dict(re.findall(r"^- (\w+): (.+)$", text, flags=re.MULTILINE))
    return f"{fields['device']}; {fields['versions']}; {fields['date'][:10]}; `{fields['command']}`"


def block(root: Path = ROOT) -> str:
    """Return the README's section of measured figures.

    The figures come from the results below ``root``.
    """
    results = root / "experiments" / "results"
    lines = ["## Measured", ""]
    if sums := headline.gradient_sums(results):
        lines += [f"{sentence(sums.data)} [Why, and other cases](docs/gradient_sums.md).", ""]
    lines += step_tables.sentence(results)
    lines += [cost_of_scaling(results), ""]
    lines += ["[All results](docs/measured.md), with devices, versions, dates and commands."]
    return "\n".join(lines)


def cost_of_scaling(results: Path) -> str:
    """Return a sentence with the smallest and the largest cost of loss scaling, each with its step."""
    costs, devices = [], []
    for file in sorted(results.glob("loss_scaling*/loss_scaling.md")):
        parts = sections(file)
        devices.append(facts(next(iter(parts.values()))).split(";")[0])
        for heading, text in parts.items():
            step = heading.removesuffix(STEP_TITLE)
            costs += [(float(row[5].split()[0]), step) for row in _rows(text) if row[0] == "jaxmp.loss_scaling"]
    (least, small), (most, large) = min(costs), max(costs)
    return (
        f"Loss scaling changes the time of a step by {least:+.1f} % ({small}) to {most:+.1f} % ({large}), on "
        f"{' and '.join(dict.fromkeys(devices))}."
    )


_WITH_SCALING = ("jaxmp.loss_scaling", "jmp.DynamicLossScale", "flax DynamicScale", "no scaling, again")


def cost_table(results: Path) -> list[str]:
    """Return a Markdown table of the time that loss scaling adds to a step."""
    lines = ["| step | jaxmp | jmp | flax | the same step again |", "|---|---:|---:|---:|---:|"]
    for file in sorted(results.glob("loss_scaling*/loss_scaling.md")):
        for heading, text in sections(file).items():
            added = {row[0]: row[5] for row in _rows(text)}
            if added:
                cells = [added.get(name, "–") for name in _WITH_SCALING]
                lines.append(f"| {heading.removesuffix(STEP_TITLE)} | {' | '.join(cells)} |")
    return lines


def _provenance(run: dict[str, str]) -> str:
    return facts(run["What loss scaling adds to a train step"])


def _rows(text: str) -> list[list[str]]:
    """Return the cells of a table in Markdown, without its two lines of headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def folded(title: str, lines: list[str]) -> list[str]:
    """Return lines of Markdown that a page shows on a click."""
    return ['<details markdown="1">', f"<summary>{title}</summary>", "", *lines, "", "</details>", ""]


def measured_block(root: Path = ROOT) -> str:
    """Return the measured figures for docs/measured.md.

    The figures come from the results below ``root``.
    """
    results = root / "experiments" / "results"
    demo = sections(results / "demo" / "compare.md")
    conclusion = demo["Comparison"].strip().splitlines()[0]
    lines = list[str]()
    if sums := headline.gradient_sums(results):
        lines += [
            "## Sums of gradients",
            "",
            f"{sentence(sums.data)} [Why, and other cases](docs/gradient_sums.md).",
            "",
            "![Errors of the gradients of params, by case and method]"
            f"({sums.path.with_suffix('.png').relative_to(root)})",
            "",
        ]
        lines += folded(MEASURED, [sums.line(root)])
    lines += ["## On a GPU, against PyTorch and float32", ""]
    lines += step_tables.measured(results)
    shown, provenance = headline.lines(results, root)
    lines += [*shown, *folded(MEASURED, provenance)]
    lines += [
        "## Accuracy",
        "",
        "`make demo` trains a language model on Python's source code (pysource) and a classifier of digits (digits).",
        "",
        conclusion,
        "",
        "![Held-out loss and test accuracy under five precisions](experiments/results/demo/compare.png)",
        "",
        "The results for pysource:",
        "",
        table(demo["pysource: result"]),
        "",
    ]
    lines += folded(MEASURED, [facts(demo["Comparison"])])
    lines += [
        "## The cost of loss scaling",
        "",
        "The table shows how much longer a train step takes with loss scaling than without. The time of loss scaling",
        "does not depend on the batch size, so its share is larger with a small batch. The last column compares two",
        "measurements of the same step without loss scaling: smaller differences than this are noise.",
        "",
        *cost_table(results),
        "",
    ]
    runs = [(file, sections(file)) for file in sorted(results.glob("loss_scaling*/loss_scaling.md"))]
    lines += folded(
        MEASURED, [f"[{file.parent.name}]({file.relative_to(root)}): {_provenance(run)}\n" for file, run in runs]
    )
    other_results = sorted({*results.glob("*/*.md")} - {*results.glob("demo/*")} - {*results.glob("loss_scaling*/*")})
    other_results = [
        file for file in other_results if not re.search(r"^- command: .* --smoke", file.read_text(), re.MULTILINE)
    ]
    if other_results:
        links = [f"- [{file.parent.name}]({file.relative_to(root)})" for file in other_results]
        lines += ["## All files of results", "", *folded("Files", links)]
    return "\n".join(lines).replace("](docs/", "](").replace("](experiments/", "](../experiments/")


def gradient_sums_block(root: Path = ROOT) -> str:
    """Return the measured figures for docs/gradient_sums.md.

    The figures come from the newest result below ``root``.
    """
    source = headline.gradient_sums(root / "experiments" / "results")
    if source is None:
        name = "gradient_sums"
        return f"Not measured yet: `python -m experiments.benchmarks.{name} --run-dir experiments/results/{name}`.\n"
    file = source.path.with_suffix(".md")
    picture = Path("..") / source.path.with_suffix(".png").relative_to(root)
    lines = [f"![Errors of the gradients of params, by case and method]({picture})", ""]
    parts = sections(file)
    for heading, text in parts.items():
        if "|" in text:
            lines += [f"*{heading}*", "", table(text), ""]
    return "\n".join([*lines, NOTE, "", facts(next(iter(parts.values()))), ""])


def sharding_block(root: Path = ROOT) -> str:
    """Return the table for docs/sharding.md of the GPUs that a model needs.

    The table comes from the newest result below ``root``.
    """
    source = headline.newest(root / "experiments" / "results", "sharded", lambda run: not run["smoke"])
    if source is None:
        return "Not compiled yet: `python -m experiments.benchmarks.compile_only --topology 1x1x8`.\n"
    lines = [
        "| GPUs | GiB on each | GB that each sends in a step | GPUs with enough memory (10 % stay free) |",
        "|---|---:|---:|---|",
    ]
    for row in source.data["rows"]:
        if (row["setting"]["size"], row["way"]) != ("7B", "linen"):
            continue
        cards = [name.upper() for name in FOR_MANY_GPUS if row["peak"] <= 0.9 * GPUS[name].memory_bytes]
        how = f"{row['gpus']} ({row['topology']})"
        lines.append(f"| {how} | {row['peak'] / 2**30:.1f} | {row['wire'] / 1e9:.1f} | {', '.join(cards) or 'none'} |")
    parts = sections(source.path.with_suffix(".md"))
    details = [table(parts["Each GPU"]), "", ABOUT, "", source.line(root)]
    lines += ["", *folded("All sizes and adapters, and how they were compiled", details)]
    return "\n".join(lines).replace("](experiments/", "](../experiments/")


def real_libraries_block(root: Path = ROOT) -> str:
    """Return the table for docs/real_libraries.md.

    The table has the errors of gradients under autocast, by program.
    """
    file = root / "experiments" / "results" / "real_libraries" / "real_libraries.json"
    programs: dict[str, dict[str, dict]] = {}
    for row in json.loads(file.read_text())["programs"]:
        programs.setdefault(f"{row['library']}: {row['program']}", {})[row["half"]] = row
    lines = [
        "| program | bfloat16: autocast | half products | all half | float16: autocast | half products | all half "
        "| FLOPs in half under autocast |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for title, rows in programs.items():
        errors = [percent(rows[half][way][1]) for half in ("bfloat16", "float16") for way in ("autocast", "T", "N")]
        share = f"{100 * rows['bfloat16']['half_share']:.0f} %"
        notes = ", ".join(sorted({row["verdict"] for row in rows.values()} - {""}))
        lines.append(f"| {title}{f' ({notes})' if notes else ''} | {' | '.join(errors)} | {share} |")
    record = file.with_suffix(".md")
    link = f"[The full record](../{record.relative_to(root)}), with the errors of the losses"
    return "\n".join([_conclusion(programs), "", *lines, "", f"{link}: {facts(record.read_text())}", ""])


def rules_block(root: Path = ROOT) -> str:
    """Return the tables for docs/real_libraries.md about the rules of autocast."""
    results = root / "experiments" / "results"
    errors, memory = results / "ablation" / "ablation.json", results / "ablation_memory" / "ablation_memory.json"
    records = []
    for name, record in (("Errors", errors), ("Memory", memory)):
        page = record.with_suffix(".md")
        records += ["", f"[{name}](../{page.relative_to(root)}): {facts(page.read_text())}"]
    return "\n".join([*ablation_table.block(errors, memory), *records, ""])


def _conclusion(programs: dict[str, dict[str, dict]]) -> str:
    """Return a sentence that says how many programs meet the goal, and which do not."""
    verdicts = {title: {row["verdict"] for row in rows.values()} for title, rows in programs.items()}
    missed = [title for title, verdict in verdicts.items() if "worse than T" in verdict]
    ill = [title for title, verdict in verdicts.items() if "ill-conditioned" in verdict and title not in missed]
    met = len(programs) - len(missed) - len(ill)
    text = f"{met} of {len(programs)} programs meet the goal."
    text += f" Ill-conditioned: {'; '.join(ill)}." if ill else ""
    return text + (f" Missed: {'; '.join(missed)}." if missed else "")


def tune_block(root: Path = ROOT) -> str:
    """Return the table for docs/tools/tune.md, from the newest result below ``root``."""
    source = headline.newest(root / "experiments" / "results", "tune", lambda run: not run["smoke"])
    if source is None:
        return "Not measured yet: `python -m experiments.benchmarks.tune --run-dir experiments/results/tune`.\n"
    parts = sections(source.path.with_suffix(".md"))
    text = next(text for text in parts.values() if "|" in text)
    return "\n".join([table(text), "", TUNE_NOTE, "", source.line(root), ""]).replace(
        "](experiments/", "](../../experiments/"
    )


def gpus_block() -> str:
    """Return the table of GPUs for docs/tools/index.md."""
    lines = [
        "| name | GPU | memory, GiB | memory, GB/s | TFLOP/s: float32 | TF32 | half | float8 |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, gpu in GPUS.items():
        rates = [gpu.float32, gpu.tensorfloat32, gpu.half, gpu.float8]
        cells = ["–" if rate is None else f"{rate:g}" for rate in rates]
        figures = [f"{gpu.memory_gib}", f"{gpu.bandwidth_gb:,}", *cells]
        lines.append(f"| `{name}` | {gpu.device_kind} | {' | '.join(figures)} |")
    return "\n".join([*lines, ""])


def float32_products_block(root: Path = ROOT) -> str:
    """Return the table for docs/concepts/formats.md, from the newest result below ``root``."""
    name = "matmul_precision"
    source = headline.newest(root / "experiments" / "results", name, lambda run: not run["smoke"])
    if source is None:
        return f"Not measured yet: `python -m experiments.benchmarks.{name} --run-dir experiments/results/{name}`.\n"
    (text,) = [text for text in sections(source.path.with_suffix(".md")).values() if "|" in text]
    return f"{text.strip()}\n\n{source.line(root)}\n".replace("](experiments/", "](../../experiments/")


def roofline_block(root: Path = ROOT) -> str:
    """Return the table for docs/tools/roofline.md of predicted and measured times.

    The predictions come from the newest steps compiled for an H200 below ``root``.
    """
    source = headline.newest(
        root / "experiments" / "results", "compile_only", lambda run: bool(predictions.predictions(run["results"]))
    )
    if source is None:
        return "Not compiled yet: `python -m experiments.benchmarks.compile_only`.\n"
    (prediction,) = predictions.predictions(source.data["results"])
    text = prediction.markdown().partition("\n\n")[2]
    return f"{text}\n{source.line(root)}\n".replace("](experiments/", "](../../experiments/")


PAGES = {
    ("README.md", "results"): block,
    ("docs/measured.md", "results"): measured_block,
    ("docs/gradient_sums.md", "results"): gradient_sums_block,
    ("docs/sharding.md", "results"): sharding_block,
    ("docs/tools/roofline.md", "results"): roofline_block,
    ("docs/tools/index.md", "gpus"): gpus_block,
    ("docs/real_libraries.md", "results"): real_libraries_block,
    ("docs/real_libraries.md", "rules"): rules_block,
    ("docs/tools/tune.md", "results"): tune_block,
    ("docs/concepts/formats.md", "results"): float32_products_block,
}
"""For each page and marker, the function that returns the text."""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__)
        sys.exit()
    try:
        for (page, marker), text_of in PAGES.items():
            write_marked(ROOT / page, marker, COMMAND, text_of())
    except ValueError as error:
        sys.exit(f"error: {error}")
