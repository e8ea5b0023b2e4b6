"""What ranks that read or save models would make each for itself: the fork server imports this, and has it made."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen3")  # a thousand patterns, those of all families
gc.set_threshold(300_000, 20, 20)  # a rank of a test lives for seconds: looking for garbage takes a tenth of its time
