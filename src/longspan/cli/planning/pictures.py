"""Pictures that `plan` and `simulate` write: what kind of file a name says, checked before anything is planned."""

from collections.abc import Sequence
from pathlib import Path

from longspan.errors import ConfigError


def check_pictures(paths: Sequence[str], kinds: Sequence[str], drawn: str) -> None:
    """Raise ConfigError for a name whose ending is none of the kinds that are drawn, and for a missing folder."""
    for path in paths:
        if kind_of_picture(path) not in kinds:
            endings = f"{', '.join(f'.{kind}' for kind in kinds[:-1])} or .{kinds[-1]}"
            raise ConfigError(f"--plot {path}: {drawn} is drawn as {endings}; give a name that ends so")
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {Path(path).parent}")


def kind_of_picture(path: str) -> str:
    """The ending of a file's name, in small letters and without its dot."""
    return Path(path).suffix.lower().removeprefix(".")


def write_file(path: str, content: str) -> None:
    """Write a file that a flag names. Raises ConfigError for what the disk refuses."""
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
