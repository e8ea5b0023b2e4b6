"""What a run does before its first step."""
