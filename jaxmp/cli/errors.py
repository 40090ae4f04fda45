"""The error that ends a command with one line."""


class UsageError(ValueError):
    """A wrong argument on the command line; the text is one line."""
