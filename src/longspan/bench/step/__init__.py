"""`longspan bench step`: whole training steps under several planners, next to their predictions."""
