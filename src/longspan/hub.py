"""Names of the Hugging Face hub, ORG/NAME: their folders in the local cache, and folders that are uploaded to them.

Nothing is downloaded unasked.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from longspan.errors import ConfigError

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?P<inside>(/[\w.-]+)*)")
# These are settings and tokenizers.
_SETTINGS = ("*.json", "*.jinja", "*.model", "*.model.v3", "*.txt", "*.tiktoken")
# Only files of the first pattern are downloaded; the cache may have others.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def find_local_path(
    path: str,
    key: str,
    kind: Literal["model", "dataset"] = "model",
    *,
    download: bool = False,
    download_key: str = "",
    weights: bool = False,
) -> str:
    """Return `path` as it is, unless it is a name of the hub: for that, the folder that the local cache has of it.

    >>> find_local_path("Qwen/Qwen3-0.6B", "model.path", weights=True)  # doctest: +SKIP
    '/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2…'

    What exists on this machine is no name. A data set's name may go on with a path inside it, which is then returned
    inside the folder. Only with `weights` must the folder of a model have its weights. With `download` what the cache
    lacks is downloaded, by one process of the host at a time. `key` and `download_key` are the keys that errors name.
    Raises ConfigError for a name that is not there, or that the hub does not give.
    """
    name = _NAME.fullmatch(path)
    if name is None or (kind == "model" and name["inside"]) or Path(path).expanduser().exists():
        return path
    # The import takes a second.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import WeakFileLock

    repo = name["repo"]
    options = dict[str, Any](repo_type=kind)
    if kind == "model":
        options["allow_patterns"] = [*_SETTINGS, *_WEIGHTS[:1]] if weights else [*_SETTINGS]
        options["ignore_patterns"] = ["original/*", "consolidated*"]  # the same weights once more
    folder = _cached_folder(snapshot_download, repo, options, weights=weights)
    if folder is None and download:
        locks = Path(constants.HF_HUB_CACHE) / ".locks"
        try:
            locks.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(locks / f"longspan--{kind}--{repo.replace('/', '--')}.lock"):
                # another process may have downloaded it meanwhile
                folder = _cached_folder(snapshot_download, repo, options, weights=weights)
                folder = folder or snapshot_download(repo, **options)
        except Exception as error:  # httpx, huggingface_hub and the file system each raise their own
            raise ConfigError(
                f"{key} {path!r} cannot be downloaded ({download_key} is true): {_one_line(error)}"
            ) from error
    if folder is None and kind == "dataset" and Path(path).parent.is_dir():
        return path  # more likely a file that is not there, which its reader says
    if folder is None:
        needs_sizes_only = key in ("--model", "model.path", "model.config") and not weights
        options_text = " --repo-type dataset" if kind == "dataset" else ""
        options_text += " config.json" if needs_sizes_only else ""
        raise ConfigError(
            f"{key} {path!r} does not exist on this machine, nor in the Hugging Face cache "
            f"({constants.HF_HUB_CACHE}); hf download {repo}{options_text} --local-dir {repo.partition('/')[2]} "
            "downloads it" + (f", or --{download_key} into the cache" if download_key else "")
        )
    inside = Path(folder) / name["inside"].strip("/")
    if not inside.exists():
        raise ConfigError(f"{key} {path!r}: {folder}, which is {repo}, has no {name['inside'].strip('/')}")
    return str(inside)


def hub_name(folder: Path) -> str:
    """Return the name ORG/NAME of a folder of the local cache; "" for another folder."""
    cached = re.fullmatch(r"(models|datasets)--(.+?)--(.+)", folder.parent.parent.name)
    if cached and folder.parent.name == "snapshots":
        return f"{cached[2]}/{cached[3]}"
    return ""


def _cached_folder(
    snapshot: Callable[..., str], repo: str, options: dict[str, Any], *, weights: bool
) -> str | None:
    """`snapshot` is huggingface_hub's `snapshot_download`, which finds a folder without weights too. None where the
    cache lacks files that `options` name, or weights."""
    try:
        folder = snapshot(repo, local_files_only=True, **options)
    except OSError:
        # huggingface_hub's LocalEntryNotFoundError, and for files that are missing IncompleteSnapshotError
        return None
    if not weights or any(any(Path(folder).glob(pattern)) for pattern in _WEIGHTS):
        return folder
    return None


def check_push_access(name: str) -> None:
    """Raise ConfigError for what is no name of the hub, and where the hub accepts no login of this machine."""
    match = _NAME.fullmatch(name)
    if match is None or match["inside"]:
        raise ConfigError(f"--push {name!r} is no name of the hub; give ORG/NAME, such as my-name/my-model")
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise ConfigError(
            f"--push {name} needs a login to the hub, and there is none; hf auth login, or set HF_TOKEN"
        )
    try:
        HfApi().whoami()
    except Exception as error:
        raise ConfigError(
            f"--push {name}: the hub does not accept the login: {_one_line(error)}; hf auth login makes a new one"
        ) from error


def push_folder(folder: Path, name: str, message: str, *, private: bool) -> str:
    """Upload a folder's files as a commit, to a new repository or one that is there; returns its address."""
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(name, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except Exception as error:
        raise ConfigError(
            f"{folder} is written, and cannot be uploaded: {_one_line(error)}; hf upload {name} {folder} tries again"
        ) from error
    return str(address)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
