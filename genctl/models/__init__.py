"""Where weights and tokenizers come from, and how ids become text. Entered by its files."""
