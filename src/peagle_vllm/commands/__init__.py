"""The subcommands of ``peagle-vllm``, one file each. Heavy imports stay inside the functions: ``--help`` is quick."""
