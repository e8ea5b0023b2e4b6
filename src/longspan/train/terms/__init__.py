"""What features add to a step, each a `Term` (`train/passes.py`): encoders, losses of the caller's, routers, depths."""
