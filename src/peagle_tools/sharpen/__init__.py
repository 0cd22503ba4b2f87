"""``peagle-vllm sharpen``: fit a selector to a head that is served as it is.

prompts -> record (the served drafter's candidates beside what the target said) -> fit -> measure (served again)
"""
