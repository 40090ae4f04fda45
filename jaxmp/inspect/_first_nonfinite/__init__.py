"""Find the first infinity or NaN: :func:`jaxmp.inspect.first_nonfinite`.

- ``first_nonfinite.py``: the function and its report
- ``stepping.py``: a run of the program, one equation at a time
- ``known_lengths.py``: the program with scans in place of while loops
- ``suspects.py``: the search from the results back to the origin
- ``origins.py``: the elements of one operation at which infinities and NaNs begin
"""
