"""What ends a command with one line."""


class UsageError(ValueError):
    """What was asked for on the command line cannot be done; the text is one line."""
