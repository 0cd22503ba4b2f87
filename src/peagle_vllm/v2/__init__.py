"""P-EAGLE on vLLM's Model Runner V2."""
