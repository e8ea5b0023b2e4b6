"""What the files of a tokenizer are called in a Hugging Face folder. No torch."""

FAST_TOKENIZER = "tokenizer.json"
VOCABULARIES = (  # of tokenizers of any kind
    FAST_TOKENIZER,
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tiktoken.model",
)
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
