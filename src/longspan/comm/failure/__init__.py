"""What a rank is doing, and what ranks tell each other when a collective fails."""
