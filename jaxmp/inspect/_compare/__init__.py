"""Measure how a policy, or another program, changes the numbers: :func:`jaxmp.inspect.compare`.

- ``compare.py``: the function and its report
- ``run.py``: a run of one program that records its values and gradients
- ``loops.py``: loops over the batch or over time that only one of the programs has
- ``positions.py``: the order of a loop's iterations, also of a loop over a reversed array
- ``rows.py``: the values of both programs, matched, and their differences
- ``entry.py``: the scope where the error enters
- ``log_probs.py``: the difference of two programs in the log-probabilities of tokens
"""
