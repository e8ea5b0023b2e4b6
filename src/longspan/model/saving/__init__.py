"""A prepared model's weights: to a Hugging Face folder, from one, and whole ones by name."""
