"""Fixed and padded plans, and what all planners are asked for."""
