"""An error that tells callers whether another attempt may succeed, and any error as a line."""


class Interrupted(ValueError):
    """The disk, the network or a process failed, not the request: the same command may succeed later."""


def described(error: Exception) -> str:
    """The class and the message of another's error, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
