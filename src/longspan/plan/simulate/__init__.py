"""What planners and degrees would cost on a cluster."""
