"""Text to token ids: chat templates, special tokens, encoding."""
