"""LoRA adapters of peft inside a model: found, refused, drawn, left out, saved and merged."""
