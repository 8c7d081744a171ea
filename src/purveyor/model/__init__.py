"""The words every part shares: the error tree and the rules for names. Standard library only."""
