"""Upload an exported folder to the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError

from fla_train.hub.checksums import REMEDY, find_export_damage
from fla_train.hub.paths import own_name
from fla_train.utils.hub_names import is_hub_name

HTTPError = HfHubHTTPError.__bases__[0]  # of the HTTP library that this huggingface_hub uses: httpx or httpx2


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Create the model repository if it is new, and upload `folder` as one commit.

    Args:
        folder: an exported model; it is only read.
        repo_id: `user/name`; `name` alone is the token's user's.
        private: whether a new repository is private.
        revision: branch to commit to, created if it is new; None is the default branch.
        token: access token; None takes the logged-in one (`hf auth login` or HF_TOKEN).
        endpoint: address of the Hub; None is the client's default.

    Returns:
        The commit's address.

    Raises:
        ValueError: `repo_id` is no valid name, there is no token, or a file of `folder` is damaged.
        ConnectionError: no network, or the Hub refused; one line with the remedy.
    """
    folder = Path(folder)
    check_repo_id(repo_id)
    token = token or get_token()
    if token is None:
        raise ValueError(f"no Hub token: run `hf auth login` or set HF_TOKEN; the model is safe in {folder}")
    if damage := find_export_damage(folder):
        raise ValueError(f"{folder}/{damage}: {REMEDY}")
    api = HfApi(endpoint=endpoint, token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with the user's name
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        message = f"Upload {own_name(folder)} with fla-train"
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message
        )
    except HfHubHTTPError as refusal:
        raise ConnectionError(
            f"the Hub refused {repo_id}: {_line(refusal)}; the model is safe in {folder}"
        ) from refusal
    except (HTTPError, OSError, RuntimeError) as failure:  # RuntimeError: from hf_xet, which uploads weights
        remedy = f"the model is safe in {folder}, push it later with `fla-export checkpoint={folder}"
        raise ConnectionError(
            f"cannot reach the Hub at {api.endpoint} ({_line(failure)}): {remedy} hub.repo_id={repo_id}`"
        ) from failure
    return str(commit.commit_url)


def check_repo_id(repo_id: str) -> None:
    """Raise `ValueError` unless a model on the Hub can have this name."""
    if not is_hub_name(repo_id):
        raise ValueError(f"hub.repo_id={repo_id} is not a name of the form user/model")


def _line(failure: Exception) -> str:
    return " ".join(str(failure).split()) or type(failure).__name__
