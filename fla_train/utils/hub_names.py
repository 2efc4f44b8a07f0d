"""Check names of repositories on the Hub, and whether it answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fla_train.utils.errors import Interrupted

ANSWER_TIMEOUT = 5  # seconds


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


def hub_failure() -> str | None:
    """Return why the Hub can't be reached; None if it answers."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "offline (HF_HUB_OFFLINE)"
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_TIMEOUT)
    except Exception as error:  # the classes depend on the HTTP client of huggingface_hub
        return f"no answer from {constants.ENDPOINT} ({error})"
    return None


def read_error(failure: Exception, message: str) -> ValueError:
    """Return the error to raise for files that can't be read: `Interrupted` if the Hub did not answer."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    unreachable = isinstance(failure.__cause__, LocalEntryNotFoundError)
    return Interrupted(message) if unreachable else ValueError(message)


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Read files from the cache if the Hub does not answer, instead of retrying each one for 25 seconds."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = hub_failure() is not None
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
