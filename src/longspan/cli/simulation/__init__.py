"""Tables of `longspan simulate`: plans beside each other, and evaluation degrees."""
