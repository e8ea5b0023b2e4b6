"""What `longspan plan` and `longspan simulate` plan for: document lengths, images, a model and a machine."""
