"""Measure what each rounding costs: :func:`jaxmp.inspect.error_budget`.

- ``budget.py``: the function and its report
- ``gradient_program.py``: the program of a function, or of a loss with its gradients
- ``sites.py``: the roundings in a program
- ``tapped_evaluation.py``: the program with float32 in place of half precision, and a tap at each site
- ``rounding.py``: rounding errors, and the taps
- ``run.py``: the runs of the program, and the effect of each site
- ``rows.py``: sites grouped into rows, modules, lines and rules
- ``reasons.py``: the reason for each site, from the cast plan
- ``sentences.py``: the result in words
"""
