"""The page docs/zoo.md, made from the records of the zoo: each error's thread, and its three sentences.

python -m tests.zoo.page docs/zoo.md
"""

import sys
from pathlib import Path

from tests.zoo import GROUPS, KNOWN_ERRORS
from tests.zoo.known_error import KnownError

_HEAD = """# Silent errors of others

This page lists {count} errors that happened in other systems without a message, and says why each cannot happen here.

In these threads people found, measured and mostly repaired them; each could have been ours. What a thread says is as of
September 2026.

A test ([tests/zoo](../tests/zoo/test_zoo.py)) checks each error: it compares loss and every gradient with a dense model
in float64 (within 1e-10), or compares integers. It runs once more with the other system's error put into our source,
and must then fail.
"""


def zoo_page() -> str:
    """Return the text of the page, in Markdown."""
    parts = [_HEAD.format(count=len(KNOWN_ERRORS))]
    for title, errors in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [_entry_text(error) for error in errors]
    return "\n".join(parts)


def _entry_text(error: KnownError) -> str:
    """Write one error: its name as a heading, then a line each for its thread and its three sentences."""
    return (
        f"### {error.name[0].upper()}{error.name[1:]}\n\n"
        f"- Thread: [{error.thread}]({error.link})\n"
        f"- What happened: {error.happened}\n"
        f"- How it is seen: {error.seen}\n"
        f"- Why not here: {error.prevented}\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(zoo_page(), encoding="utf-8")
