"""Report the memory that a call needs: :func:`jaxmp.inspect.memory`.

- ``memory.py``: the function and its report
- ``arrays.py``: the arrays in memory at the peak
- ``batch.py``: the search for the largest batch that fits
"""
