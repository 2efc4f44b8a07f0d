"""Check names of repositories on the Hub."""


def is_hub_name(name: str) -> bool:
    """Return whether `name` can be a repository of the Hub: `user/model` or `model`, not a path."""
    from huggingface_hub.errors import HFValidationError  # not needed for --help
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
