"""Losses of one's own: of targets (`token_loss.py`), of whole documents (`document_loss.py`); log-probabilities."""
