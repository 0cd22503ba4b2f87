"""P-EAGLE on vLLM's V1 model runner. Delete this folder the day vLLM drops that runner."""
