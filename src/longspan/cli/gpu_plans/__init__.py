"""Questions about GPUs: what fits, with which keys, how long it takes; for `plan --gpu` and `train --dry-run`."""
