"""What a person or a program sees of a run. Imports nothing of ours but errors."""
