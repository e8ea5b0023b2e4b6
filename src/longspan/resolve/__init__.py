"""What a configuration leaves open ("auto", and a degree 0) is decided here, once for every caller. No torch, no world.

`resolved.py` has `resolve`; its search is in `ways.py`, what it depends on in `facts.py`.
"""
