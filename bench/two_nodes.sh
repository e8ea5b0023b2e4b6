#!/bin/sh
# Run a command on two emulated nodes of this machine: bench/two_nodes.sh [--ranks N] [--rate 2.65G] COMMAND…
# `bench/two_nodes.sh --help` shows the flags. PYTHON names the interpreter (python of the PATH, or of this checkout's .venv).
here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd) || exit 1
if [ -z "$PYTHON" ]; then
    PYTHON=$here/.venv/bin/python
    [ -n "$VIRTUAL_ENV" ] || [ ! -x "$PYTHON" ] && PYTHON=python
fi
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
exec "$PYTHON" -m bench.processes.two_nodes "$@"
