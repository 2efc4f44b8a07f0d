"""Report the settings of one format that the other cannot express."""


def refuse(errors: list[str], from_format: str, to_format: str) -> None:
    """Raise `ValueError` with all errors, if there are any."""
    if errors:
        raise ValueError(f"{from_format} can't be translated to {to_format}: {'; '.join(errors)}")
