"""The endless stream of a corpus's documents: shuffled epochs of each source, computed where they are asked for."""
