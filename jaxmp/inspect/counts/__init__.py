"""Count values by magnitude, for ``numerics``, ``Watch`` and the plots.

- ``counting.py``: the counts of an array, on the device
- ``statistics.py``: the statistics of a tensor, computed from its counts
- ``step_records.py``: the counts of all tensors of a step
- ``counting_step.py``: a train step that also counts
"""
