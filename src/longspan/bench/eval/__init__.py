"""`longspan bench eval`: an evaluation at another degree than training, on the same ranks and weights."""
