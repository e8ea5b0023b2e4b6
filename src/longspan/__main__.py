"""`python -m longspan` and `torchrun -m longspan`: the command line."""

import sys

from longspan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
