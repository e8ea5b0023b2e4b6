"""Multi-token prediction: more decoder layers behind a causal model, each of which predicts a token further ahead."""
