"""What ranks that read or save models would make each for itself: the fork server imports this, and has it made."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen3")  # a thousand patterns, those of all families
