"""What a rank is doing, and how ranks report a collective that fails."""
