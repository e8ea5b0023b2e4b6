"""Conversations: what the chat template writes for them, and which of it the assistant says."""
