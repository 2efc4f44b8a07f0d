"""Upload an exported folder to the Hugging Face Hub."""

import re
import time
from collections.abc import Collection
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
    get_token,
    hf_hub_url,
)
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from huggingface_hub.utils.sha import git_hash

from fla_train.hub.checksums import CHECKSUMS, REMEDY, find_export_damage, listed_files, visible_files
from fla_train.hub.paths import own_name
from fla_train.hub.published_card import CARD, published_card
from fla_train.utils.filesystem import sha256
from fla_train.utils.hub_names import is_hub_name

# Of the HTTP library that this huggingface_hub uses: httpx (1.x) or httpx2
HTTPError = HfHubHTTPError.__bases__[0]
ConnectError = import_module(HTTPError.__module__.partition(".")[0]).ConnectError
PAUSES = (1.0, 5.0, 25.0)  # seconds before another attempt
LONGEST_PAUSE = 300.0  # seconds, whatever Retry-After asks for
PASSING = (408, 409, 412, 429)  # refusals by which another attempt may succeed, besides 5xx
ACCESS = (401, 403, 404)  # refusals of a token or a name
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
NO_TOKEN = "no Hub token: run `hf auth login` or set HF_TOKEN"


class Pushed(NamedTuple):
    """Where an export is on the Hub; `uploaded` is false if it was there already."""

    address: str
    uploaded: bool


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
    token: str | None = None,
    endpoint: str | None = None,
) -> Pushed:
    """Create the model repository if it is new, and upload `folder` as one commit.

    The card goes up as `published_card` makes it. Weights and files of an earlier export that `folder` lacks
    are deleted there; others stay. Where the xet storage can't be reached, weights go by LFS. What may pass
    (lost connections, 429 and the like) is tried again.

    Args:
        folder: an exported model; it is only read.
        repo_id: `user/name`; `name` alone is the token's user's.
        private: whether a new repository is private.
        revision: branch to commit to, created if it is new; None is the default branch.
        tag: of the commit. Nothing is uploaded if it is there with the same files, whatever its card says, in
            the branch `revision` if one is given; else a tag that is there is moved.
        license: for the card, the Hub's name of a licence such as `apache-2.0`.
        language: for the card, a code such as `en`.
        origin: the export that `folder` was made from: messages name it, its evaluations are in the card.
        token: access token; None takes the logged-in one (`hf auth login` or HF_TOKEN).
        endpoint: address of the Hub; None is the client's default.

    Returns:
        The address of the commit or the tag, and whether anything was uploaded.

    Raises:
        ValueError: `repo_id` is no valid name, there is no token, a file of `folder` is damaged, or the
            header of its card is invalid.
        ConnectionError: no network, or the Hub refused; one line with the remedy.
    """
    folder = Path(folder)
    origin = Path(origin or folder)
    check_repo_id(repo_id)
    token = token or get_token()
    if token is None:
        raise ValueError(f"{NO_TOKEN}; the model is safe in {origin}")
    if damage := find_export_damage(folder):
        raise ValueError(f"{folder}/{damage}: {REMEDY}")
    visible_files(folder)  # refuses links before there is a repository
    api = HfApi(endpoint=endpoint, token=token)

    uploaded = False  # also by a try that failed afterwards

    def upload() -> Pushed:
        nonlocal uploaded
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with the user's name
        tagged = None if tag is None else _files_at(api, name, tag)
        if tagged and _is_equal(api, name, tag, tagged, folder) and _contains(api, name, revision, tag):
            return Pushed(f"{api.endpoint}/{name}/tree/{tag}", uploaded=False)
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        card = published_card(folder, name, origin, license=license, language=language)
        before = api.model_info(name, revision=revision).sha
        commit = _commit(api, name, revision, folder, card)
        uploaded = uploaded or commit.oid != before
        if tagged is not None:
            api.delete_tag(name, tag=tag)
        if tag is not None:
            api.create_tag(name, tag=tag, revision=commit.oid)
        return Pushed(str(commit.commit_url), uploaded)

    for pause in (*PAUSES, None):
        try:
            return upload()
        except ValueError as invalid:
            raise ValueError(_line(invalid, token)) from None
        except (HTTPError, ConnectionError, RuntimeError) as error:
            upload_failed = isinstance(error, RuntimeError) and isinstance(error.__cause__, HTTPError)
            failure = error.__cause__ if upload_failed else error
            wait = None if pause is None else _wait(failure, pause)
            if wait is None:
                line, safe = _line(failure, token), f"the model is safe in {origin}"
                if isinstance(failure, HfHubHTTPError):
                    line = f"the Hub refused {repo_id}: {line}; {safe}"
                else:
                    command = f"fla-export checkpoint={origin} hub.repo_id={repo_id}"
                    later = f"push it later with `{command}` and your other options (dtype, hub.*)"
                    line = f"cannot reach the Hub at {api.endpoint} ({line}): {safe}, {later}"
                raise ConnectionError(line) from None  # the cause's text may hold the token
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def check_repo_id(repo_id: str) -> None:
    """Raise `ValueError` unless a model on the Hub can have this name."""
    if not is_hub_name(repo_id):
        raise ValueError(f"hub.repo_id={repo_id} is not a name of the form user/model")


def check_access(repo_id: str, *, private: bool = True) -> None:
    """Create the repository if it is new, and so learn before hours of work whether a push can succeed.

    Raises:
        ValueError: there is no token, or the Hub refuses the token or the name.
        ConnectionError: the Hub can't be reached now.
    """
    token = get_token()
    if token is None:
        raise ValueError(NO_TOKEN)
    try:
        HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True)
    except (HTTPError, ConnectionError) as failure:
        line = _line(failure, token)
        if isinstance(failure, HfHubHTTPError) and failure.response.status_code in ACCESS:
            raise ValueError(f"the Hub refuses hub.repo_id={repo_id}: {line}") from None
        raise ConnectionError(line) from None


def _commit(api: HfApi, name: str, revision: str | None, folder: Path, card: str) -> CommitInfo:
    """Commit all but hidden files of `folder`, with `card` as README.md; delete earlier exports' others."""
    names = visible_files(folder)
    there = api.list_repo_files(name, revision=revision)
    operations = [CommitOperationAdd(n, card.encode() if n == CARD else folder / n) for n in names]
    operations += [CommitOperationDelete(n) for n in _earlier(api, name, revision, there) if n not in names]
    message = f"Upload {own_name(folder)} with fla-train"
    commit = partial(api.create_commit, name, operations, commit_message=message, revision=revision)
    try:
        return commit()
    except (OSError, RuntimeError) as failure:
        if isinstance(failure, HTTPError) or constants.HF_HUB_DISABLE_XET:
            raise
    constants.HF_HUB_DISABLE_XET = True  # the xet storage can't be reached: LFS takes the files, too
    try:
        return commit()
    finally:
        constants.HF_HUB_DISABLE_XET = False


def _earlier(api: HfApi, name: str, revision: str | None, there: Collection[str]) -> list[str]:
    """Of the files at `revision`, weights and those that an export there lists; others are the user's."""
    listed = {CHECKSUMS}
    if CHECKSUMS in there:
        # Not by hf_hub_download: it gives an old copy where the Hub does not answer.
        address = hf_hub_url(name, CHECKSUMS, revision=revision, endpoint=api.endpoint)
        answer = get_session().get(address, headers=build_hf_headers(token=api.token))
        hf_raise_for_status(answer)
        listed |= listed_files(answer.content).keys()
    return [file for file in there if file in listed or file.endswith(WEIGHTS)]


def _files_at(api: HfApi, name: str, tag: str) -> dict[str, RepoFile] | None:
    """The files at `tag`, by name; None: there is no such tag."""
    try:
        files = api.list_repo_tree(name, revision=tag, recursive=True)
        return {file.path: file for file in files if isinstance(file, RepoFile)}
    except RevisionNotFoundError:
        return None


def _is_equal(api: HfApi, name: str, tag: str, there: dict[str, RepoFile], folder: Path) -> bool:
    """Whether the export that is at `tag`, among the files `there`, is that of `folder`, but for the card."""
    names = {n for n in visible_files(folder) if n != CARD}
    if not names.issuperset(_earlier(api, name, tag, there)) or not names <= there.keys():
        return False
    return all(_is_same(folder / n, there[n]) for n in names)


def _is_same(path: Path, file: RepoFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    return sha256(path) == file.lfs.sha256 if file.lfs else git_hash(path.read_bytes()) == file.blob_id


def _contains(api: HfApi, name: str, branch: str | None, tag: str) -> bool:
    """Whether `branch` has the commit of `tag`; None is the default branch, which is not asked."""
    if branch is None:
        return True
    try:
        commits = {commit.commit_id for commit in api.list_repo_commits(name, revision=branch)}
    except RevisionNotFoundError:
        return False
    return api.model_info(name, revision=tag).sha in commits


def _wait(failure: Exception, pause: float) -> float | None:
    """Seconds before another attempt, at least `pause`; None: it would fail in the same way."""
    if not isinstance(failure, HfHubHTTPError):
        return pause if isinstance(failure, HTTPError) and not isinstance(failure, ConnectError) else None
    status, asked = failure.response.status_code, failure.response.headers.get("Retry-After", "")
    if status not in PASSING and status < 500:
        return None
    return min(max(pause, float(asked) if asked.isdecimal() else 0.0), LONGEST_PAUSE)


def _line(failure: Exception, token: str) -> str:
    """One line, without the token and the signatures of upload addresses, which errors may quote."""
    text = re.sub(r"\?[^\s'\"]+", "", " ".join(str(failure).split()).replace(token, "***"))
    return text or type(failure).__name__
