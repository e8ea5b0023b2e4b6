"""Plans in which every micro-batch has the groups that suit its documents, of any degree; `planner.py` makes them."""
