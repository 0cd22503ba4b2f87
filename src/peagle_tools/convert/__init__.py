"""``peagle-vllm convert``: a head in another format, with a window, or with fewer draft tokens."""
