"""Say in sentences which line causes the error, and what float32 would change."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmp._internals.jax.sources import user_line_of
from jaxmp.inspect._budget.measurement import BudgetGroup, operations_of
from jaxmp.inspect._switched.sites import Site
from jaxmp.inspect.gradient_error import LARGEST_GOOD_ERROR, percent
from jaxmp.policy.patterns import covers, path_and_primitive
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.scopes import named_scopes
from jaxmp.program.values import Equation

NOTABLE = 0.25
"""The share of the error from which a line is worth a sentence and a run."""
_REST, _REST_WITH_PRODUCTS = 0.9, 0.5
"""The largest share of the error that may remain if float32 is advised; the second, if products would leave half."""
_NEAR_FLOOR = 2.0
"""The factor between the error and the floor below which no override is advised."""


@dataclass(frozen=True)
class Advice:
    """Float32 for the operations that cause most of the error of one line.

    Attributes:
      key: the key of the override; None if a float32 region is advised.
      source: the line of the region.
      without: the paths whose operations, and products, the region leaves out; None if it leaves nothing out.
    """

    key: str | None
    source: str
    without: frozenset[str] | None = None

    def covers(self, equation: Equation) -> bool:
        """Return whether the advice makes an operation float32."""
        if self.key is not None:
            pattern, primitive = path_and_primitive(self.key)
            return primitive in ("", equation.name) and covers(pattern, named_scopes(equation.names))
        is_left_out = self.without is not None and (equation.name in PRODUCTS or equation.path in self.without)
        return equation.source == self.source and not is_left_out

    def __str__(self) -> str:
        if self.key is not None:
            return f'Add the override {{"{self.key}": "float32"}}.'
        region = 'ut `with jaxmp.precision("float32"):` around the'
        if self.without is None:
            return f"P{region} line."
        return f"Write the products of this line on a line of their own, and p{region} rest."


def advice_for(sites: Sequence[Site], all_sites: Sequence[Site], *, is_shared: bool) -> Advice:
    """Return the advice for the sites that cause most of the error of a line.

    Args:
      sites: these sites.
      all_sites: all sites of the program.
      is_shared: whether the operations of the line are in several modules or scopes.
    """
    source = sites[0].equation.source
    places = {(site.equation.path, site.equation.name) for site in sites}
    paths = {path for path, _ in places}
    if len(paths) == 1 and min(paths):
        path = glob.escape(min(paths))
        if len(places) == 1:
            (_, operation), *_ = places
            return Advice(f"{path}:{operation}", source)
        if is_shared:
            return Advice(path, source)
    if any(site.is_of_product for site in sites):
        return Advice(None, source)
    products = {site.equation.path for site in all_sites if site.is_of_product and site.equation.source == source}
    return Advice(None, source, frozenset(products - paths) if products else None)


@dataclass(frozen=True)
class AdviceRun:
    """A run under an advice.

    Attributes:
      line: the group of the line.
      sites: the sites of the line that cause most of its error.
      advice: the advice.
      after: the error with the advice.
      share: the share of the squared error that comes from the line.
      products: the number of products that the advice makes float32.
    """

    line: BudgetGroup
    sites: Sequence[Site]
    advice: Advice
    after: float
    share: float
    products: int

    def __lt__(self, other: AdviceRun) -> bool:
        return self.after > other.after

    def is_enough(self, before: float) -> bool:
        """Return whether the advice lowers an error notably, also for the products that it costs."""
        return self.after < (_REST_WITH_PRODUCTS if self.products else _REST) * before


def sentence_of_line(run: AdviceRun, before: float, results: str) -> str:
    """Return a sentence about the line that causes the largest share of the error.

    Args:
      run: the run under the advice.
      before: the error without the advice.
      results: the name of the results that have the error: gradients or results.
    """
    line, sites, after = run.line, run.sites, run.after
    text = _text_of(sites[0].equation)
    place = f"{line.name or 'code of unknown origin'}{f', {text}' if text else ''}"
    start = f"{percent(run.share)} of the {results}' error comes from one line: {place}"
    if line.overflows:
        start = f"{_number(line.overflows, 'number')} overflow in one line: {place}"
    start = f"{start}, {operations_of(sites)}"
    was_finite, is_finite = math.isfinite(before), math.isfinite(after)
    if not was_finite and not is_finite:
        return f"{start}. With float32 there the error is still infinite, because of other lines."
    if was_finite and not run.is_enough(before):
        return f"{start}. With float32 there the error is {percent(after)} instead of {percent(before)}."
    rest = f"{_number(run.products, 'product')} would leave half" if run.products else "no product leaves half"
    gain = f"float32 there lowers the error from {percent(before)} to {percent(after)}, and {rest}"
    return f"{start}: {gain}. {run.advice}"


def sentence_of_floor(error: float, floor: float) -> str:
    """Return a sentence about an error near the floor, the error if only the operands of products round."""
    return (
        f"The error of {percent(error)} is near the floor of {percent(floor)}, the error if only the operands of "
        "products are rounded, so float32 elsewhere gains little."
    )


def sentence_of_spread(largest: BudgetGroup, error: float, error_of_products: float, results: str) -> str:
    """Return a sentence about an error to which many lines contribute.

    Args:
      largest: the line with the largest share.
      error: the error.
      error_of_products: the error if only products round.
      results: the name of the results that have the error.
    """
    return (
        f"No line causes most of the {results}' error: the largest share is {percent(largest.share)}, of "
        f"{largest.name or 'code of unknown origin'}. If only the products were half, the error would be "
        f"{percent(error_of_products)} instead of {percent(error)}."
    )


def is_near_floor(error: float, floor: float) -> bool:
    """Return whether an error is small, and float32 elsewhere than in products gains little."""
    return error <= min(_NEAR_FLOOR * floor, LARGEST_GOOD_ERROR)


def _text_of(equation: Equation | None) -> str:
    """Return the text of the user's line that wrote an equation."""
    while equation is not None:
        if text := user_line_of(equation.eqn):
            return text.partition("  #")[0].rstrip()  # without a comment
        equation = equation.around
    return ""


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
