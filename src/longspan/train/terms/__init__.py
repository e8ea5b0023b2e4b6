"""What features add to a step, each a `Term` (`train/passes.py`): encoders, losses of the caller's, routers, depths."""

from longspan.train.terms.encoders import plan_waves_ahead as plan_waves_ahead
