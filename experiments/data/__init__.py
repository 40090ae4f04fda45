"""Read data sets through tensorflow-datasets (TFDS), without TensorFlow.

`digits` (images) and `pysource` (text) are made from installed packages, so nothing is downloaded. `mnist`,
`fashion_mnist` and `cifar10` are TFDS's data sets. :mod:`experiments.data.stock` says where their files may be.

:func:`read` prepares a data set in the data folder the first time, and returns its splits as columns.
:mod:`experiments.data.images` and :mod:`experiments.data.text` put the columns on the device and make batches there. To
add a data set, add its builder to ``IMAGES`` or ``BUILDERS`` in :mod:`experiments.data.source`.
"""

from __future__ import annotations

from experiments.data.errors import DataError as DataError
from experiments.data.source import BUILDERS as BUILDERS
from experiments.data.source import IMAGES as IMAGES
from experiments.data.source import default_data_dir as default_data_dir
from experiments.data.source import origin as origin
from experiments.data.source import read as read
