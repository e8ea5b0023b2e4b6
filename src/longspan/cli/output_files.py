"""The files that a command writes where a flag says."""

from pathlib import Path

from longspan.errors import ConfigError
from longspan.files import name_file_in_errors, os_error_text


def write_text_file(path: str | Path, text: str) -> None:
    """Write a file that a flag names, in UTF-8, over one that is there.

    Raises ConfigError for what the disk refuses.
    """
    try:
        with name_file_in_errors(Path(path)):
            Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {os_error_text(error)}") from error
