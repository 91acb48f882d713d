"""A small synthetic language and its tokenizer, for the demonstration model."""
