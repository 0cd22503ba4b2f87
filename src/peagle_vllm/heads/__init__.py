"""Head checkpoints: reading, checking and converting them. Imports no vLLM and no torch.

files.find(name) -> folder | HeadFiles    where the head is; ``download`` for its weights
head.read_head(folder) -> Head             config.json and the safetensors headers, and what serving makes of them
checks.check_head(head) -> [Problem]       what is wrong with the head alone; ``check_pair`` adds the target
convert.convert(head, folder, to, target)  the same weights in vLLM's own format or speculators'
"""
