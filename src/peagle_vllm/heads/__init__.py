"""Head checkpoints: reading, checking and converting them. Imports no vLLM and no torch."""
