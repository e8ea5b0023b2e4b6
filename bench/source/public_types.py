"""How much of the installed wheel has known types, by `pyright --verifytypes`: `make types`.

    python bench/source/public_types.py WHEEL

The wheel is unpacked into an empty virtual environment that sees this environment's packages: pyright finds `py.typed`
of installed packages only, takes them from the `python` on PATH, and does not read `--pythonpath` here. It fails where
a public name (what `longspan` and the modules of `PUBLIC` have in `__all__`), or a member of one, is not known, and
below LEAST of all symbols.
"""

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

LEAST = 0.99
ANY_BASES = ("LongspanMixin", "LongspanTrainer", "LongspanLM")  # classes of another library's base, Any on purpose


def main(wheel: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        answer = verify_types(Path(wheel), Path(folder))
    symbols: list[dict[str, Any]] = answer["symbols"]
    exported = [symbol for symbol in symbols if symbol["isExported"]]
    if not exported:
        print("pyright found no symbols: is py.typed in the wheel?")
        return 1
    share = sum(map(is_known, exported)) / len(exported)
    members = public_symbols(symbols)
    unknown = [s for s in members if not is_known(s) and s["name"].rpartition(".")[2] not in ANY_BASES]
    for symbol in unknown:
        reasons = "; ".join(note["message"].replace("\n", " ") for note in symbol["diagnostics"])
        print(f"{symbol['name']}: {reasons or 'what it is made of is not known'}")
    print(f"public names and their members: {len(members) - len(unknown):,} of {len(members):,} known")
    print(f"all symbols: {share:.1%} of {len(exported):,} known, at least {LEAST:.0%} wanted")
    return int(bool(unknown) or share < LEAST)


def verify_types(wheel: Path, folder: Path) -> dict[str, Any]:
    """What pyright says of the wheel, unpacked in an environment in `folder`."""
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    zipfile.ZipFile(wheel).extractall(site)
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    pyright = str(Path(sys.executable).with_name("pyright"))
    words = [pyright, "--verifytypes", "longspan", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise SystemExit(f"pyright failed: {done.stdout}{done.stderr}")
    return json.loads(done.stdout)["typeCompleteness"]


def public_symbols(symbols: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Symbols that are a public name or a member of one."""
    from tests.test_surface import PUBLIC

    names = set[str]()
    homes = set[str]()
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            value = getattr(module, name)
            names.add(f"{module.__name__}.{name}")
            if hasattr(value, "__qualname__"):
                homes.add(f"{value.__module__}.{value.__qualname__}")
    return [
        symbol
        for symbol in symbols
        if symbol["name"] in names | homes or any(symbol["name"].startswith(f"{home}.") for home in homes)
    ]


def is_known(symbol: dict[str, Any]) -> bool:
    """Whether every type checker sees the same type of a symbol."""
    return symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
