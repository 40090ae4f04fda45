"""Say in sentences which roundings cause the error, and what float32 would change."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmp._internals.jax.sources import user_line_of
from jaxmp.inspect._budget.rows import BudgetGroup
from jaxmp.inspect._budget.sites import Site
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.values import Equation

NOTABLE = 0.25
"""The share of the error from which a line is worth a sentence and a run."""
_REST, _REST_WITH_PRODUCTS = 0.9, 0.5
"""The largest share of the error that may remain if float32 is advised; the second, if products would leave half."""
_TRUSTED = 2.0
"""The factor between the predicted and the measured error from which errors are not small."""


@dataclass(frozen=True)
class LineRun:
    """A run without the roundings that float32 would save in one line.

    Attributes:
      line: the group of the line.
      sites: the sites of the line that are left out.
      before, after: the relative error of the gradients with and without the roundings.
      has_other_products: whether the line has half products that are not among its main operations.
    """

    line: BudgetGroup
    sites: Sequence[Site]
    before: float
    after: float
    has_other_products: bool = False


def sentence_of_line(run: LineRun, results: str) -> str:
    """Return a sentence about the line that causes the largest share of the error.

    ``results`` is the name of the results that have the error: gradients or results.
    """
    text = _text_of(run.sites[0].equation)
    place = f"{run.line.name or 'code of unknown origin'}{f', {text}' if text else ''}"
    start = f"{percent(min(run.line.share, 1))} of the {results}' error comes from one line: {place}"
    if run.line.overflows:
        start = f"{_number(run.line.overflows, 'number')} overflow in one line: {place}"
    start = f"{start}, {_operations(run.sites)}"
    was_finite, is_finite = math.isfinite(run.before), math.isfinite(run.after)
    if not was_finite and not is_finite:
        return f"{start}. Without its roundings the error is still infinite, because of other lines."
    products = sum(site.operation in PRODUCTS and not site.is_operand for site in run.sites)
    largest_rest = _REST_WITH_PRODUCTS if products else _REST
    if was_finite and not run.after < largest_rest * run.before:
        return f"{start}. Without its roundings the error is {percent(run.after)} instead of {percent(run.before)}."
    rest = f"{_number(products, 'product')} would leave half" if products else "no product leaves half"
    gain = f"float32 there lowers the error from {percent(run.before)} to {percent(run.after)}, and {rest}"
    return f"{start}: {gain}. {_how(run)}"


def sentence_of_spread(largest: BudgetGroup, results: str) -> str:
    """Return a sentence about an error to which many lines contribute.

    ``largest`` is the line with the largest share.
    """
    return (
        f"No line causes most of the {results}' error: the largest share is {percent(largest.share)}, of "
        f"{largest.name or 'code of unknown origin'}."
    )


def sentence_of_products(error: float, error_of_products: float) -> str:
    """Return a sentence that compares an error with the error if only products round. Both are relative."""
    return (
        f"If only the products were half, the error would be {percent(error_of_products)} instead of {percent(error)}."
    )


def is_mismatch(predicted: float, measured: float) -> bool:
    """Return whether the roundings do not explain the measured error."""
    if math.isfinite(predicted) and not math.isfinite(measured):
        return True
    small, large = sorted((predicted, measured))
    return large > _TRUSTED * small


def sentence_of_mismatch(predicted: float, measured: float, results: str, *, has_gaps: bool) -> str:
    """Return a warning that the roundings do not explain the measured error.

    ``has_gaps`` says whether operations are not covered.
    """
    if not math.isfinite(measured):
        return (
            f"The error of the {results} is not finite under the policy; jaxmp.inspect.first_nonfinite names the "
            f"operation. Without the numbers that overflow, the roundings cause an error of {percent(predicted)}."
        )
    start = (
        f"The roundings explain an error of {percent(predicted)} of the {results}, but {percent(measured)} is measured."
    )
    if has_gaps:
        return f"{start} The operations that are not covered may cause the rest."
    return (
        f"{start} So errors are not small somewhere: a number overflows (see jaxmp.inspect.first_nonfinite), or a "
        "choice changes, such as a ReLU, a maximum, a bin or the result of top_k (see jaxmp.inspect.compare)."
    )


def percent(share: float) -> str:
    """Return a share as a percentage with two digits.

    >>> percent(0.00642), percent(0.84)
    ('0.64 %', '84 %')
    """
    if not math.isfinite(share):
        return "infinite"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def _text_of(equation: Equation | None) -> str:
    """Return the text of the user's line that wrote an equation."""
    while equation is not None:
        if text := user_line_of(equation.eqn):
            return text.partition("  #")[0].rstrip()  # without a comment
        equation = equation.around
    return ""


def _how(run: LineRun) -> str:
    """Return how to compute the main operations of a line in float32."""
    region = 'Put `with jaxmp.precision("float32"):` around the line'
    if run.has_other_products:
        region = (
            'Write the products of this line on a line of their own, and put `with jaxmp.precision("float32"):` around '
            "the rest"
        )
    override = override_of(run.sites)
    return f"{region}." if override is None else f'{region}, or pass overrides={{"{override}": "float32"}}.'


def override_of(sites: Sequence[Site]) -> str | None:
    """Return the override that names an operation of one scope, or None if the sites are of several."""
    places = {(site.equation.path, site.operation) for site in sites if site.phase == "forward"}
    if len(places) != 1 or not min(places)[0]:
        return None
    path, operation = min(places)
    return f"{glob.escape(path)}:{operation}"


def _operations(sites: Sequence[Site]) -> str:
    """Return how often each operation of the line is rounded in the forward pass, or in all if there is none."""
    forward = [site for site in sites if site.phase == "forward"] or list(sites)
    counts: dict[str, int] = {}
    for site in forward:
        counts[site.rounded_operation] = counts.get(site.rounded_operation, 0) + (site.equation.count or 1)
    return ", ".join(f"{count} × {name}" for name, count in counts.items())


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
