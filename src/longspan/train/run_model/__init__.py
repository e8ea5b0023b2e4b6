"""The model of a run as its configuration has it: read, loaded, checked and prepared."""
