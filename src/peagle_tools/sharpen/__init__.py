"""``peagle-vllm sharpen``: fit a selector to a head that is served as it is.

prompts -> record (the served drafter's candidates, and the target's tokens) -> fit -> measure (served again)
"""
