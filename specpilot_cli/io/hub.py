"""Checkpoints by their name on the Hugging Face Hub: `owner/name` or `owner/name@revision`.

A name becomes the folder of one commit in the user's Hub cache, downloaded where it is missing.
That folder holds links into the cache's content-addressed files: it is only ever read.
"""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError, MachineError, SpecPilotError
from specpilot_cli.schema.w12_manifest import HubSource
from specpilot_cli.ui import Reporter, SilentReporter

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^@\s]+))?")

# What a checkpoint needs and a model folder should keep: weights, configuration, tokenizer,
# templates, the model's own code, its licence.
_WANTED = (
    "*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.py", "*.md",
    "LICENSE*", "NOTICE*",
)  # fmt: skip
OFFLINE = "the network is switched off by HF_HUB_OFFLINE"

# Answers after which the Hub's client asks again, for 23 seconds in all.
_BUSY = (408, 429, 500, 502, 503, 504)
# Second copies of the weights in other layouts.
_UNWANTED = (
    "*/*.safetensors", "consolidated*", "original/*", "onnx/*", "openvino/*", "gguf/*",
)  # fmt: skip


def resolve_source(
    source: str,
    *,
    bars: bool = False,
    reporter: Reporter = SilentReporter(),
) -> Path:
    """Return the folder that `source` names: itself if it is one, else a snapshot of a hub id.

    With HF_HUB_OFFLINE nothing is asked of the network; if the Hub does not answer within
    HF_HUB_ETAG_TIMEOUT (10 seconds), the commit last seen is taken from the cache. `bars`: let the
    Hub's client draw its progress bars on stderr.

    InputError: neither a folder nor a hub id, no such repository or revision, a cache that leads
    elsewhere. MachineError: no huggingface_hub, not in the cache while offline, no access to a
    gated repository, a failed download.
    """
    if Path(source).is_dir():
        return Path(source)
    match = _HUB_ID.fullmatch(source)
    if match is None or Path(source).exists():
        raise InputError(
            f"no such model folder: `{source}`",
            where=source,
            hint="give a folder with config.json and safetensors files, or a hub id such as "
            "`owner/name` or `owner/name@revision`",
        )
    repo, revision = match["repo"], match["revision"]
    path = _snapshot(repo, revision, bars=bars, reporter=reporter)
    origin = hub_origin(path)
    if origin is None or origin.repo != repo or ".." in path.parts or path.is_symlink():
        raise InputError(
            f"the Hub cache leads `{source}` to `{path}`, which is no snapshot of `{repo}`",
            where=source,
            hint="the cache's `refs` or `snapshots` were altered: delete the repository from the "
            "cache and fetch it again",
        )
    reporter.note(f"{repo} at {origin.revision}: `{path}`")
    return path


def is_hub_id(source: str) -> bool:
    """Whether `source` has the form of a hub id, `owner/name` or `owner/name@revision`."""
    return _HUB_ID.fullmatch(source) is not None


def fetch_file(source: str, name: str) -> Path | str:
    """File `name` of hub id `source`, from the cache or fetched alone; or why it cannot be had.

    Nothing is asked of the network with HF_HUB_OFFLINE. A reason is given without huggingface_hub,
    without an answer within HF_HUB_ETAG_TIMEOUT (10 seconds), and for a file that is not there;
    `InputError` for a repository that does not exist, `MachineError` for one that refuses access.
    """
    match = _HUB_ID.fullmatch(source)
    if match is None:
        raise InputError(f"not a hub id: `{source}`", where=source, hint="write `owner/name`")
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError:
        return "huggingface_hub is not installed"
    silence = _silence()
    http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        found = hf_hub_download(
            match["repo"], name, revision=match["revision"],
            local_files_only=silence is not None, tqdm_class=_hidden_bar(),
        )  # fmt: skip
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise _explained(error, source, match["repo"], silence, errors) from error
    except (http_error, errors.HFValidationError, OSError) as error:
        absent = isinstance(error, errors.EntryNotFoundError) and silence is None
        return f"the repository has no {name}" if absent else silence or _first_line(error)
    return Path(found)


def fetch_dataset_file(repo: str, name: str, revision: str | None = None) -> Path:
    """File `name` of the dataset `repo` at commit `revision`: from the cache, or fetched.

    MachineError without huggingface_hub, without an answer, or where access is refused; InputError
    for a repository, a commit or a file that does not exist.
    """
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError as error:
        raise MachineError(
            f"`{repo}` comes from the Hub, which needs huggingface_hub",
            where=repo,
            hint="pip install 'specpilot[hub]', or give a file",
        ) from error
    silence = _silence()
    http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        return Path(
            hf_hub_download(
                repo, name, repo_type="dataset", revision=revision,
                local_files_only=silence is not None, tqdm_class=_hidden_bar(),
            )
        )  # fmt: skip
    except (http_error, errors.HFValidationError, OSError) as error:
        absent = isinstance(error, errors.EntryNotFoundError)
        if absent and not isinstance(error, errors.LocalEntryNotFoundError):
            raise InputError(
                f"the dataset `{repo}` has no file `{name}`", where=repo, hint="it was renamed"
            ) from error
        raise _explained(error, repo, repo, silence, errors) from error


def hub_origin(path: Path) -> HubSource | None:
    """Return repository and commit of a folder in a Hub cache, None for any other folder."""
    commit = path.absolute()
    kind, *parts = commit.parent.parent.name.split("--")
    is_snapshot = commit.parent.name == "snapshots" and kind == "models" and 1 <= len(parts) <= 2
    if not is_snapshot or not re.fullmatch(r"[0-9a-f]{40}", commit.name):
        return None
    return HubSource(repo="/".join(parts), revision=commit.name)


def _snapshot(repo: str, revision: str | None, *, bars: bool, reporter: Reporter) -> Path:
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise MachineError(
            f"`{repo}` is no folder here, and reading it from the Hub needs huggingface_hub",
            where=repo,
            hint="pip install 'specpilot[hub]', or give a folder",
        ) from error
    if not constants.HF_HUB_OFFLINE:
        reporter.note(f"no folder `{repo}` here: asking {constants.ENDPOINT}")
    silence = _silence()
    # The HTTP library differs between versions of huggingface_hub; its errors share this base.
    http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            local_files_only=silence is not None,
            tqdm_class=None if bars else _hidden_bar(),
        )
    except (http_error, errors.HFValidationError, OSError, UnicodeDecodeError) as error:
        asked = f"{repo}@{revision}" if revision else repo
        raise _explained(error, asked, repo, silence, errors) from error
    if silence is not None and silence != OFFLINE:
        reporter.warn(f"{silence}; `{repo}` is taken from the Hub cache")
    return Path(folder)


def _silence() -> str | None:
    """Why the network is not to be asked, or None."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    return _no_answer(constants.ENDPOINT, float(constants.HF_HUB_ETAG_TIMEOUT))


@functools.cache
def _no_answer(endpoint: str, limit_s: float) -> str | None:
    """Why the Hub at `endpoint` cannot be asked, None if it answers; asked once in a process.

    The Hub's client asks an unreachable host six times for every file. A thread asks first, since
    no limit of the client's holds for a name server that is silent.
    """
    from huggingface_hub import get_session

    outcome: list[str | None] = []

    def ask() -> None:
        try:
            status = get_session().head(endpoint, timeout=limit_s).status_code
            outcome.append(f"HTTP {status}" if status in _BUSY else None)
        except Exception as error:  # noqa: BLE001 - whatever it is, there was no answer
            outcome.append(_first_line(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(limit_s)
    reason = outcome[0] if outcome else f"nothing came in {limit_s:g} s"
    return None if reason is None else f"the Hub at {endpoint} does not answer: {reason}"


def _hidden_bar() -> Any:
    from huggingface_hub.utils.tqdm import tqdm

    class HiddenBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options["disable"] = True
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]

    return HiddenBar


def _explained(
    error: Exception, asked: str, repo: str, silence: str | None, errors: Any
) -> SpecPilotError:
    """Return what went wrong in this program's words; silence: of `_silence`."""
    if isinstance(error, UnicodeDecodeError):
        return MachineError(
            f"the Hub cache of `{repo}` is damaged: a file that names a commit is not text",
            where=asked,
            hint=f"delete the folder `models--{repo.replace('/', '--')}/refs` in the cache and "
            "run the same command again",
        )
    if isinstance(error, errors.HFValidationError):
        return InputError(
            f"not a hub id: `{asked}` ({error})",
            where=asked,
            hint="give `owner/name` as it stands in the address of the model's page, or a folder",
        )
    if isinstance(error, errors.GatedRepoError):
        return MachineError(
            f"`{repo}` is gated and this machine has no access to it",
            where=asked,
            hint=f"accept its terms on the page of {repo}, then `hf auth login` or set HF_TOKEN",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return InputError(
            f"neither a folder here nor a repository on the Hub: `{repo}`",
            where=asked,
            hint="check the spelling; a private repository needs `hf auth login` or HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(
            f"`{repo}` has no branch, tag or commit of that name",
            where=asked,
            hint="a revision follows `@`: owner/name@main",
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and silence == OFFLINE:
        return MachineError(
            f"`{asked}` is not completely in the Hub cache, and {OFFLINE}",
            where=asked,
            hint="unset HF_HUB_OFFLINE, or give a folder",
        )
    return MachineError(
        f"cannot fetch `{asked}` from the Hub: {silence or _first_line(error)}",
        where=asked,
        hint="check the network and the free disk space, then run the same command again: what "
        "was fetched is kept; without a network give a folder, or set HF_HUB_OFFLINE=1 if it was "
        "fetched before",
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].removeprefix("Got: ") if lines else type(error).__name__
