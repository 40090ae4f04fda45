"""Find exponentials and logarithms that are computed in half precision. Exponentials include powers."""

from __future__ import annotations

from jaxmp.inspect._audit.evidence import Audited, Fault, Faults
from jaxmp.program.primitives import Trait, with_trait

_EXPONENTIAL = with_trait(Trait.GROWS, Trait.LOGARITHM)


def half_exponentials(audited: Audited) -> Faults:
    """Find half exponentials and logarithms, except those on the lines of error functions.

    The derivative of an error function is an exponential of at most 1, on the same line.
    """
    lines_of_erf = set[tuple[str, str]]()
    for value in audited.program.values:
        if value.equation and value.name.startswith("erf"):  # erf, erfc
            lines_of_erf.add((value.equation.path, value.equation.source))
    for value in audited.program.values:
        equation = value.equation
        if equation is None or value.name not in _EXPONENTIAL or not value.is_half:
            continue
        if (equation.path, equation.source) not in lines_of_erf:
            what = f"{value.name} in {value.dtype.name}, which loses the range or the digits that it needs"
            yield Fault(equation, what, "cast to float32 before it")
