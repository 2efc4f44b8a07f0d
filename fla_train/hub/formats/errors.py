"""Error for a setting of one format that the other cannot express."""


class FormatError(ValueError):
    """Lists all such settings with the reasons."""


def refuse(errors: list[str], from_format: str, to_format: str) -> None:
    """Raise `FormatError` if there are any errors."""
    if errors:
        raise FormatError(f"{from_format} can't be translated to {to_format}: {'; '.join(errors)}")
