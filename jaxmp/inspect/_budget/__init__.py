"""Measure what each line's roundings cost: :func:`jaxmp.inspect.error_budget`.

- ``budget.py``: the function and its report
- ``measurement.py``: the runs of the program, and the cost of modules and lines
- ``sentences.py``: the result in words
"""
