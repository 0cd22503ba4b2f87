"""What is asked where the user names no prompts: short questions of several kinds."""

PROMPTS = (
    "Explain how a hash table works, with an example.",
    "Write a Python function that returns the n-th prime number, and explain it.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show each step.",
    "Summarise the causes of the French Revolution in five sentences.",
    "Write a SQL query that lists the ten customers with the most orders last year.",
    "Translate into German: The meeting has been moved to Thursday afternoon because of the holiday.",
    "What is the difference between a process and a thread?",
    "Write a short story about a lighthouse keeper who finds a letter.",
)
