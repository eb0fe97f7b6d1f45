"""Text to tokens and back: tokenizer, incremental detokenizer, stop strings."""
