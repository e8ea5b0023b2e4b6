"""The shape of a model from its configuration: layers, widths, mixers, experts."""
