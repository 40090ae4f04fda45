"""The error of data sets."""


class DataError(ValueError):
    """A data set could not be prepared, read or split into batches.

    The message says what to do.
    """
