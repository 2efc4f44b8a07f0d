"""Names of repositories on the Hub."""


def is_hub_name(name: str) -> bool:
    """Whether a repository of the Hub can be called `name`: `user/model`, or `model` alone; no path can."""
    from huggingface_hub.errors import HFValidationError  # not needed for --help
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
