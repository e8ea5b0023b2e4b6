"""Where the rows of a run go: its logs (`metrics.jsonl`, `plans.jsonl`, `groups.jsonl`) and its loggers.

Loggers are tensorboard, wandb, and your own.

>>> from longspan.run.loggers import Logger, RunStart           # what a logger of your own implements and receives
"""

from longspan.run.loggers.run_loggers import Logger as Logger
from longspan.run.loggers.run_loggers import RunStart as RunStart
