"""The corpus as one stream of tokens: sources, tokenizers, part files, order of reading."""
