"""Vision-language models of transformers: a tower and a projector as an encoder, and the language model behind them."""
