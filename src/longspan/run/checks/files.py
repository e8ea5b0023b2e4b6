"""Whether what a configuration names is on this machine's disk, before processes start: paths only, nothing is read.

Ranks find out themselves what files hold; where torchrun has started them, whether they are there as well.
"""

from pathlib import Path

from longspan.config.passkey_settings import PASSKEY
from longspan.config.sections import RunConfig
from longspan.corpus.files import STDLIB, find_root
from longspan.errors import ConfigError


def check_files(config: RunConfig) -> None:
    """Raise ConfigError or DataError for a model, a tokenizer or texts that are not there."""
    model, data = config.model, config.data
    for key, path in (("model.path", model.path), ("model.config", model.config), ("data.tokenizer", data.tokenizer)):
        if path and not Path(path).expanduser().exists():
            raise ConfigError(f"{key} {path!r} does not exist; give a folder or file of this machine")
    if not (Path(config.run.dir) / "corpus").exists():  # a run keeps its documents
        if data.sources:
            for number, source in enumerate(data.sources):
                find_root(source.path, key=f"data.sources[{number}].path")
        else:
            find_root(data.path or STDLIB)
    for entry in config.eval:
        if entry.path != PASSKEY:
            find_root(entry.path, key=f"{entry.prefix}path")
