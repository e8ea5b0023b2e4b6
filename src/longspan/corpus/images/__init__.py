"""Images beside text: a model folder's own processor, and images as files and rows have them."""
