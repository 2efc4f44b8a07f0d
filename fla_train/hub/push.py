"""Upload an exported folder to the Hugging Face Hub as one commit."""

import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

from fla_train.hub.card import published_card
from fla_train.hub.checksums import CARD, REMEDY, find_export_damage, visible_files
from fla_train.hub.paths import last_component
from fla_train.utils.hub_names import HubRepository
from fla_train.utils.keys import require_valid

HTTPError = HfHubHTTPError.__bases__[0]  # class of httpx or httpx2, whichever huggingface_hub uses
ACCESS = (401, 403, 404)  # statuses that reject a token or a name
NO_TOKEN = "no Hub token: run `hf auth login` or set HF_TOKEN"
# Files of an earlier export that would change how this one loads. They are deleted unless they are replaced.
# Other folders of the repository belong to its owner.
EARLIER = re.compile(
    r"[^/]*\.(safetensors|bin|index\.json)|(config|generation_config|checksums)\.json|tokenizer[^/]*"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.[^/]*|merges\.txt|chat_template\.jinja"
    r"|(modeling|delta_product|fused_ops|launching)\.py|additional_chat_templates/.*"
)


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    revision: str | None = None,
    tag: str | None = None,
    license: str | None = None,
    language: str | None = None,
    origin: str | Path | None = None,
) -> str:
    """Create the model repository if it is new, upload `folder` as one commit, and return its address.

    The card is uploaded as `published_card` returns it. Weights, tokenizer and code of an earlier export are
    deleted; other files in the repository stay. Without a changed file the commit is skipped.

    Args:
        folder: an exported model; it is only read.
        repo_id: `user/name`, or `name` alone for the user of the token.
        private: whether a new repository is private.
        revision: branch to commit to, created if it is new; None: the default branch.
        tag: name for the commit; an existing tag is moved.
        license: for the card, a licence name of the Hub such as `apache-2.0`.
        language: for the card, a code such as `en`.
        origin: the export that `folder` was made from; messages name it, and the card shows its evaluations.

    Raises:
        ValueError: `repo_id` is not a valid name, the token is missing, a file of `folder` is damaged, or the
            header of its card is invalid.
        ConnectionError: no network, or the Hub rejected the push.
    """
    folder = Path(folder)
    origin = Path(origin or folder)
    require_valid(HubRepository(repo_id), "hub.")
    token = get_token()
    if token is None:
        raise ValueError(f"{NO_TOKEN}; the model is safe in {origin}")
    if damage := find_export_damage(folder):
        raise ValueError(f"{folder}/{damage}: {REMEDY}")
    contents: dict[str, Path | bytes] = {file: folder / file for file in visible_files(folder)}
    api = HfApi(token=token)
    try:
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        if CARD in contents:
            card = published_card(folder, name, origin, license=license, language=language)
            contents[CARD] = card.encode()
        operations = [CommitOperationAdd(file, content) for file, content in contents.items()]
        for file in api.list_repo_files(name, revision=revision):
            if file not in contents and EARLIER.fullmatch(file):
                operations.append(CommitOperationDelete(file))
        message = f"Upload {last_component(folder)} with fla-train"
        commit = api.create_commit(name, operations, commit_message=message, revision=revision)
        if tag is not None:
            with suppress(RevisionNotFoundError):
                api.delete_tag(name, tag=tag)
            api.create_tag(name, tag=tag, revision=commit.oid)
    except (HTTPError, OSError, RuntimeError) as error:
        failure = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        command = f"fla-export checkpoint={origin} hub.repo_id={repo_id}"
        # The text of the cause may contain the token, so it is not chained.
        raise ConnectionError(
            f"cannot push to {repo_id} at {api.endpoint}: {_line(failure, token)}. The model is safe in "
            f"{origin}; push it later with `{command}` and your other options (dtype, hub.*)"
        ) from None
    except ValueError as error:
        raise ValueError(_line(error, token)) from None
    return f"{api.endpoint}/{name}/tree/{tag}" if tag else str(commit.commit_url)


def check_access(repo_id: str, *, private: bool = True) -> None:
    """Create the repository if it is new, to learn before training whether a push can succeed.

    Raises:
        ValueError: the token is missing, or the Hub rejects the token or the name.
        ConnectionError: the Hub cannot be reached now.
    """
    token = get_token()
    if token is None:
        raise ValueError(NO_TOKEN)
    try:
        HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True)
    except (HTTPError, ConnectionError) as failure:
        line = _line(failure, token)
        if isinstance(failure, HfHubHTTPError) and failure.response.status_code in ACCESS:
            raise ValueError(f"the Hub rejects hub.repo_id={repo_id}: {line}") from None
        raise ConnectionError(line) from None


def _line(failure: BaseException, token: str) -> str:
    """Return an error as one line, without the token and the signatures of upload addresses."""
    text = re.sub(r"\?[^\s'\"]+", "", " ".join(str(failure).split()).replace(token, "***"))
    return text or type(failure).__name__
