"""Passkey retrieval: a number hidden in made text of chosen lengths, at chosen depths, asked for at the end."""
