"""Predict the time of a call on a GPU or TPU: :func:`jaxmp.inspect.roofline`.

- ``roofline.py``: the function and its report
- ``kernels.py``: the time of each kernel, by the roofline model on a GPU and by the compiler's cycles on a TPU
"""
