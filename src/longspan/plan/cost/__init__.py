"""What a step costs: constants of a machine and a model, and bounds that no plan can beat."""
