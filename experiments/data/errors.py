"""The error of this package."""


class DataError(ValueError):
    """A set could not be prepared, read or cut into batches; the message says what to do."""
