"""What planners and degrees would cost on a machine: simulation of plans, types, partitions, evaluations."""
