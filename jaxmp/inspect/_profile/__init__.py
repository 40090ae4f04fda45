"""Measure where the time of a call goes: :func:`jaxmp.inspect.profile`.

- ``profile.py``: the function and its report
- ``repeated_call.py``: a call that can be repeated although it donates its arguments
- ``trace.py``: the kernels in a trace of JAX's profiler
- ``kernel_rows.py``: the instruction, path and phase of each kernel
- ``traced_dtypes.py``: the dtypes of products in the traced program, for a CPU
- ``kinds.py``: the kinds of kernels
- ``ceilings.py``: the fastest product and copy of the device
- ``sentences.py``: the reasons why a call is slow
"""
