"""What the site adds to the pages of docs/: the front page, files of the repository, pictures in two colours.

- README.md is the front page, CONTRIBUTING.md a page of the list and the search.
- Links that lead outside of docs/ (../bench/records/x.md, ../examples/lora.py) work in the repository as they stand. In
  the site each such file becomes a page under repository/, or a file where it holds data, and so do those it links to.
- Pictures with dark colours follow the reader's system in the repository; here they follow the switch of the site.

It does not check links: mkdocs does, with anchors, and `make docs` fails where one leads nowhere.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(
    r"(?P<before>\]\(|<img [^>]*src=\"|<source [^>]*srcset=\")(?P<target>[^)\s\"#:]+)(?P<rest>(?:#[^)\s\"]*)?[)\"])"
)
FRONT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}  # pages of their own beside those of docs/
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yml": "yaml"}
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r'<img([^>]* src=")([^"]*?([\w-]+))\.svg"([^>]*)>')
SYSTEM_DARK = re.compile(r"@media (screen and )?\(prefers-color-scheme: dark\)")  # the second in pictures of plans

_adapting: set[str] = set()  # names of pictures that have dark colours too
_page_of: dict[str, str] = {}  # a file of the repository, and what shows it in the site


def on_files(files: Files, config: Any) -> Files:
    """Add the front page and every file of the repository that a page reaches."""
    _page_of.clear()
    found = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    _page_of.update({f"docs/{file.src_uri}": file.src_uri for file in files} | FRONT)
    found += FRONT
    while found:
        path = found.pop()
        if not path.endswith(".md"):
            continue
        for target in _targets(path, (ROOT / path).read_text(encoding="utf-8")):
            if target not in _page_of and not target.startswith("docs/") and (ROOT / target).exists():
                _page_of[target] = _site_path(target)
                found.append(target)
    for path, page in _page_of.items():
        if not path.startswith("docs/"):
            files.append(_file(path, page, config))
    _adapting.clear()
    for path, page in _page_of.items():
        text = (ROOT / path).read_text(encoding="utf-8") if path.endswith(".svg") else ""
        if not SYSTEM_DARK.search(text):
            continue
        _adapting.add(Path(page).stem)
        for colors, query in (("light", "@media not all"), ("dark", "@media all")):
            name = page.removesuffix(".svg") + f"-{colors}.svg"
            files.append(File.generated(config, name, content=SYSTEM_DARK.sub(query, text)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links of a page to where the site has their files.

    The front page needs no list of pages next to it, and a search finds pages, not records and programs.
    """
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri.startswith("repository/"):
        page.meta["search"] = {"exclude": True}
    path = next((path for path, shown in _page_of.items() if shown == page.file.src_uri), None)
    return markdown if path is None or not path.endswith(".md") else _relinked(path, page.file.src_uri, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show a picture that has dark colours too in those that the switch of the site has chosen."""

    def both(found: re.Match[str]) -> str:
        before, path, name, rest = found.groups()
        if name not in _adapting:
            return found[0]
        shown = [f'<img{before}{path}-{colors}.svg#only-{colors}"{rest}>' for colors in ("light", "dark")]
        return "".join(shown)

    return PICTURE.sub(both, html)


def _targets(path: str, text: str) -> list[str]:
    """The files of the repository that a page links to."""
    links = LINK.findall(BLOCK.sub("", text))
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) for _, target, _ in links]


def _site_path(path: str) -> str:
    if path.endswith(".md"):
        return f"repository/{path}"
    if (ROOT / path).is_dir() or _is_program(path):
        return f"repository/{path}.md"
    return f"repository/{path}"


def _is_program(path: str) -> bool:
    return Path(path).suffix in LANGUAGES or Path(path).name in ("Dockerfile", "LICENSE", "Makefile")


def _file(path: str, page: str, config: Any) -> File:
    if page.endswith(".md") and not path.endswith(".md"):
        return File.generated(config, page, content=_folder(path) if (ROOT / path).is_dir() else _program(path))
    return File.generated(config, page, abs_src_path=str(ROOT / path))


def _program(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\nA file of the repository, as it stands there.\n\n````{language}\n{text}````\n"


def _folder(path: str) -> str:
    """A page of the files in a folder; those that have a page here are links."""
    names = [name for name in sorted(file.name for file in (ROOT / path).iterdir()) if not name.startswith((".", "__"))]
    shown = {name: _page_of.get(f"{path}/{name}") for name in names}
    here = posixpath.dirname(_page_of[path])
    rows = [f"- [{n}]({posixpath.relpath(p, here)})" if p else f"- {n}" for n, p in shown.items()]
    return f"# {path}\n\nThe files of this folder of the repository.\n\n" + "\n".join(rows) + "\n"


def _relinked(path: str, page: str, text: str) -> str:
    blocks = BLOCK.findall(text)

    def lead(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found["target"]))
        if target not in _page_of:
            return found[0]  # which mkdocs reports
        return f"{found['before']}{posixpath.relpath(_page_of[target], posixpath.dirname(page))}{found['rest']}"

    parts = BLOCK.split(text)
    outside = [LINK.sub(lead, part) for part in parts]
    return outside[0] + "".join(block + part for block, part in zip(blocks, outside[1:], strict=True))
