"""The parts of bench/census.py: which models there are, what is run of each, its record and the page made from it."""
