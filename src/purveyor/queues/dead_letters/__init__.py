"""Dead letters as they are stored: the letter and the store."""
