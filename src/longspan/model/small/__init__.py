"""Small copies of models: configurations of the same class and kinds of layers at widths of tens."""
