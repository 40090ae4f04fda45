"""Read data sets through tensorflow-datasets, without TensorFlow.

They are prepared once and then kept on the device.

`digits` (images) and `pysource` (text) come from what is installed on the machine: nothing is downloaded. `mnist`,
`fashion_mnist` and `cifar10` are TFDS's; :mod:`experiments.data.stock` says where their files may lie.

Every set goes through :func:`read`, which prepares it in the data folder the first time and returns its splits as
plain columns. :mod:`experiments.data.images` and :mod:`experiments.data.text` put the columns on the device and make
batches there. To add a set, add its builder to ``IMAGES`` or ``BUILDERS``: a local one, or one of TFDS.
"""

from __future__ import annotations

from experiments.data.errors import DataError as DataError
from experiments.data.source import BUILDERS as BUILDERS
from experiments.data.source import IMAGES as IMAGES
from experiments.data.source import default_data_dir as default_data_dir
from experiments.data.source import origin as origin
from experiments.data.source import read as read
