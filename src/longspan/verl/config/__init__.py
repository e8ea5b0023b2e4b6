"""Files of hydra, found by `hydra.searchpath=[pkg://longspan.verl.config]`."""
