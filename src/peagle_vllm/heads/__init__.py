"""Head checkpoints: reading them and judging them. Imports no vLLM and no torch.

locate(name) -> folder | RemoteHead    where the files are
read_head(folder) -> Head              config.json and the safetensors headers, as vLLM reads them
check_head(head) -> [Problem]          what is wrong with the head alone; core.pair adds the target
"""
