"""`FormatError`: a setting of one format that the other cannot express."""


class FormatError(ValueError):
    """The message, one line, names every such setting and why it has no counterpart."""


def refuse(errors: list[str], from_format: str, to_format: str) -> None:
    """Raise `FormatError` if there are any errors."""
    if errors:
        raise FormatError(f"{from_format} can't be translated to {to_format}: {'; '.join(errors)}")
