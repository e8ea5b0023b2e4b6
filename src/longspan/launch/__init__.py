"""Local processes: N ranks from one fork server, each with torchrun's variables."""
