"""Names of the hub: what the local cache has is used, and nothing is downloaded unasked."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from longspan.cli.train_flags import parse_train
from longspan.config.local_folders import with_local_folders
from longspan.config.sections import DataConfig, ModelConfig, RunConfig
from longspan.errors import ConfigError
from longspan.hub import find_local_path, hub_name
from longspan.train.run_model.load import add_configured_adapter

HASH = "c1899de289a04d12100db370d81485cdf75e47ca"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # a download would be an error
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(cache: Path, repo: str, *files: str) -> Path:
    folder = cache / repo / "snapshots" / HASH
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "some text"}\n')
    (cache / repo / "refs").mkdir(exist_ok=True)
    (cache / repo / "refs" / "main").write_text(HASH)
    return folder


def test_a_name_in_the_cache_is_its_folder(cache: Path) -> None:
    model = put(cache, "models--Org--tiny", "config.json", "model.safetensors")
    rows = put(cache, "datasets--org--rows", "train.jsonl", "test/rows.jsonl")
    config = RunConfig(ModelConfig(path="Org/tiny"), DataConfig(path="org/rows/train.jsonl", tokenizer="Org/tiny"))
    config = with_local_folders(config)
    assert (config.model.path, config.data.tokenizer) == (str(model), str(model))
    assert config.data.path == str(rows / "train.jsonl")
    assert with_local_folders(config) == config
    assert (hub_name(model), hub_name(rows), hub_name(cache)) == ("Org/tiny", "org/rows", "")
    with pytest.raises(ConfigError, match=r"which is org/rows, has no other.jsonl"):
        find_local_path("org/rows/other.jsonl", "data.path", "dataset")


def test_an_adapter_names_its_base_as_the_hub_does(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(cache, "models--Org--tiny", "config.json", "model.safetensors")
    monkeypatch.setattr("longspan.model.adapters.new_adapter.add_lora", lambda model, adapter: adapter.base)
    model: Any = None
    assert add_configured_adapter(RunConfig(ModelConfig(path=str(folder))), model) == "Org/tiny"
    assert add_configured_adapter(RunConfig(ModelConfig(path=str(cache))), model) == str(cache)
    assert add_configured_adapter(RunConfig(), model) == ""


def test_local_folders_go_before_the_cache_and_other_paths_are_left_to_their_readers(cache: Path) -> None:
    put(cache, "models--Org--tiny", "config.json", "model.safetensors")
    Path("Org/tiny").mkdir(parents=True)
    assert find_local_path("Org/tiny", "model.path", weights=True) == "Org/tiny"
    for path in ("", "tiny", "/no/model", "./no/model", "~/no/model", "s3://no/model", "a/b/c"):
        assert find_local_path(path, "model.path") == path


def test_a_name_that_is_nowhere_is_refused_before_other_keys(cache: Path) -> None:
    advice = r"hf download Org/no --local-dir no downloads it, or --model.download into the cache"
    with pytest.raises(ConfigError, match=rf"model.path 'Org/no' does not exist .*; {advice}"):
        parse_train(["--model.path", "Org/no"])  # optimizer.lr is not given either
    with pytest.raises(ConfigError, match=r"hf download org/no --repo-type dataset --local-dir no .*--model.download"):
        parse_train(["--data.path", "org/no"])
    with pytest.raises(ConfigError, match=r"model.path 'Org/no' cannot be downloaded \(model.download is true\): "):
        find_local_path("Org/no", "model.path", download=True, download_key="model.download")
    folder = put(cache, "models--Org--tiny", "config.json")
    assert find_local_path("Org/tiny", "model.config") == str(folder)
    with pytest.raises(ConfigError, match="hf download"):  # a folder of a configuration alone lacks weights
        find_local_path("Org/tiny", "model.path", weights=True)


@pytest.fixture
def downloads(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """What is downloaded into the cache: its name, its kind, and whether weights are asked for."""
    local, made = huggingface_hub.snapshot_download, list[tuple[str, str, bool]]()

    def snapshot(repo: str, *, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            return local(repo, local_files_only=True, **options)
        made.append((repo, options["repo_type"], "*.safetensors" in options.get("allow_patterns", ())))
        time.sleep(0.1)
        if repo == "Org/no":
            raise OSError("404: there is no such model")
        names = ("config.json", "model.safetensors", "a.jsonl")
        return str(put(cache, f"{options['repo_type']}s--{repo.replace('/', '--')}", *names))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return made


def test_what_is_missing_is_downloaded_once_where_a_key_says_so(downloads: list[tuple[str, str, bool]]) -> None:
    words = ["--model.path", "Org/tiny", "--model.download", "--data.path", "org/rows"]
    _, config = parse_train(words)
    assert downloads == [("Org/tiny", "model", True), ("org/rows", "dataset", False)]
    assert parse_train(words)[1] == config and len(downloads) == 2  # from the cache now
    parse_train(["--model.config", "Org/other", "--model.download"])
    assert downloads[2:] == [("Org/other", "model", False)]  # no weights for random ones
    assert Path(config.data.path, "a.jsonl").is_file()


def test_processes_of_a_host_download_one_after_another(cache: Path, downloads: list[tuple[str, str, bool]]) -> None:
    def find(repo: str) -> str:
        try:
            return find_local_path(repo, "model.config", download=True, download_key="model.download")
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(find, ["Org/tiny"] * 4)) == {str(cache / "models--Org--tiny" / "snapshots" / HASH)}
        assert [name for name, *_ in downloads] == ["Org/tiny"]
        (error,) = set(pool.map(find, ["Org/no"] * 3))
    assert error.endswith("cannot be downloaded (model.download is true): OSError: 404: there is no such model")
