"""`longspan bench step`: whole training steps under several planners, beside what their plans predict."""
