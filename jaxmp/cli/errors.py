"""The error that ends a command with a message of one line."""


class UsageError(ValueError):
    """An argument on the command line is wrong; the message is one line."""
