"""LoRA adapters of peft: new ones, rules for those that a model has, their files, and a model without its adapter."""
