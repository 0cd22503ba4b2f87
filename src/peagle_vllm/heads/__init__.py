"""Head checkpoints: reading, judging and converting them. Imports no vLLM and no torch.

locate(name) -> folder | RemoteHead    where the files are; find and download for tools
read_head(folder) -> Head              config.json and the safetensors headers, and what serving makes of them
check_head(head) -> [Problem]          what is wrong with the head alone; pair.check_pair adds the target
report(head, problems) -> dict         what inspect tells
convert(head, out, to) -> Head         the same weights in vLLM's own format or speculators'
"""
