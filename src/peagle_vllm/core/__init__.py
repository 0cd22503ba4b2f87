"""What both model runners share. Nothing here imports vLLM when it is imported."""
