"""Plans of training steps."""
