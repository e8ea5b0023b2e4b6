"""The files that `longspan eval` writes: losses of documents, and a folder with everything."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError
from longspan.evaluation.saved.comparison import document_rows, retrieval_grids
from longspan.evaluation.saved.request import SubjectResult
from longspan.files import as_json, json_values, os_error_text
from longspan.report.eval_page import eval_page
from longspan.report.evaluations.heat_map import passkey_pictures

PICTURE = "passkey.svg"


def check_writable(file: str, out: str, plot: str = "") -> None:
    """Raise ConfigError where results could not be written: before hours of evaluation, not after."""
    if file and Path(file).is_dir():
        raise ConfigError(f"--documents {file} is a folder; give a file in it, such as {Path(file, 'documents.jsonl')}")
    if out and Path(out).exists() and not Path(out).is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")
    if plot and Path(plot).is_dir():
        raise ConfigError(f"--plot {plot} is a folder; give a file in it, such as {Path(plot, PICTURE)}")
    parents = {flag: Path(name).parent for flag, name in (("--documents", file), ("--plot", plot)) if name}
    for flag, folder in {**parents, **({"--out": Path(out)} if out else {})}.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag}: {os_error_text(error)}") from error
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{flag}: {folder} cannot be written to; give another folder")


def write_documents(results: Sequence[SubjectResult], file: Path) -> None:
    """The loss of every document, one JSON object a line."""
    rows = document_rows(results)
    _write(file, "".join(json.dumps(json_values(row), ensure_ascii=False) + "\n" for row in rows))


def write_folder(results: Sequence[SubjectResult], record: dict[str, Any], folder: Path) -> None:
    """results.json (what --json prints), documents.jsonl, report.html and, of passkey retrieval, its picture."""
    _write(folder / "results.json", as_json(record, indent=1) + "\n")
    write_documents(results, folder / "documents.jsonl")
    if grids := retrieval_grids(results):
        write_picture(results, folder / PICTURE)
    _write(folder / "report.html", eval_page(json_values(record), [passkey_pictures(grids)] if grids else []))


def write_picture(results: Sequence[SubjectResult], file: Path) -> None:
    """What passkey retrieval shows, as an SVG."""
    _write(file, passkey_pictures(retrieval_grids(results)))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {os_error_text(error)}") from error
