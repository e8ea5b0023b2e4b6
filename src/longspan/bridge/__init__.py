"""Rows of one module's layout to the owners of another's: an encoder that feeds a language model on the same ranks."""

from longspan.bridge.bridge import Bridge

__all__ = ["Bridge"]
