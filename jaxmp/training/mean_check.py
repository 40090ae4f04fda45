"""Find a loss that divides by a number of tokens or examples that each microbatch counts itself."""

from __future__ import annotations

import jax

from jaxmp.base.graphs import reachable
from jaxmp.program.reading import read_program
from jaxmp.program.values import STACKED, Value, leading_to
from jaxmp.program.walk import computing_only
from jaxmp.training.product_check import loss_among_results, params_among_arguments


def divides_by_own_count(traced: jax.stages.Traced) -> bool:
    """Return whether the loss of a train step is divided by a scalar that each microbatch computes.

    The scalar depends on the examples and not on the params, such as the number of valid tokens.

    Args:
      traced: the traced program of a train step with several microbatches. Its results are the new state and the
        metrics.
    """
    program = read_program(computing_only(traced.jaxpr, loss_among_results(traced)))
    arguments, is_param = program.arguments, params_among_arguments(traced)
    params = {argument for n, argument in enumerate(arguments) if is_param[n]}
    _, batch = traced.args_info[0]
    of_batch = arguments[len(arguments) - len(jax.tree.leaves(batch)) :]
    examples = {argument for argument in of_batch if argument.shape}
    (loss,) = program.results
    for value in reachable([loss], _scalar_operands):
        if value.name == "div":
            sources = leading_to(value.inputs[1:])
            if sources & examples and not sources & params:
                return True
    return False


def _scalar_operands(value: Value) -> list[Value]:
    """Return the operands of a value that are scalars, or the scalars of all microbatches."""
    return [operand for operand in value.inputs if not operand.shape or operand.name == STACKED]
