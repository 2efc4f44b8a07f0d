"""Check names of repositories on the Hub."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class HubRepository:
    """Describe a model's repository on the Hub, as a section of configs."""

    repo_id: str | None = None
    private: bool = True
    license: str | None = None
    language: str | None = None

    def check(self) -> Iterator[str]:
        if self.repo_id is not None and not is_hub_name(self.repo_id):
            yield f"repo_id={self.repo_id} is not a name of the form user/model"


def is_hub_name(name: str) -> bool:
    """Return whether `name` can be a repository of the Hub: `user/model` or `model`, not a path."""
    from huggingface_hub.errors import HFValidationError  # not needed for --help
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
