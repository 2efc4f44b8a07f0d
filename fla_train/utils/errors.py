"""Define an error after which another attempt may succeed, and describe any error in one sentence."""


class Interrupted(ValueError):
    """Report a failure of disk, network or a process; a later attempt with the same request may succeed."""


class MixerError(ValueError):
    """The class `config.mixer` can't be used; the message is one line."""


def described(error: Exception) -> str:
    """Return class and message of an exception of another library on a single line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
