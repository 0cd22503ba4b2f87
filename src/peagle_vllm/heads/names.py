"""What the dialects call a head's tensors, and what vLLM's EAGLE-3 classes call them."""


def vllm_name(name: str) -> str:
    """A tensor's name as vLLM's P-EAGLE classes take it.

    NeMo puts ``model.`` before every name but lm_head's, AWS and SpecForge call the first layer ``midlayer``, and
    ``mask_hidden`` may stand inside a module.
    """
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return "mask_hidden" if name.endswith(".mask_hidden") else name
