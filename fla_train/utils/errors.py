"""Errors that tell callers whether another attempt may succeed."""


class Interrupted(ValueError):
    """The disk, the network or a process failed, not the request: the same command may succeed later."""
