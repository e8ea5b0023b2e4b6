"""Fixed and padded plans, and the options and checks that all planners share."""
