"""A bad configuration ends in one line, before any weight is loaded; a good one builds a P-EAGLE config.

And a head is data: no code next to it is run, and nothing is unpickled. Then where the plugin does not belong (plain
EAGLE-3, platforms that are not vLLM's own), and which vLLM is served: any whose definitions are as recorded, and one
whose user accepts that they differ. No engine, no weights.
"""

import json
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from peagle_vllm import lookup, patches, plugin
from peagle_vllm.lookup import prompt_lookup_min
from peagle_vllm.patches import drafter_limit, fingerprint, head_config, head_weights, validation
from peagle_vllm.patches.ledger import Definition
from peagle_vllm.patches.source import Source
from peagle_vllm.serving import RefusedError, is_peagle
from tests.support import random_heads as tiny_heads
from tests.support.dialects import edit
from tests.support.engines import name_target_on_hub
from tests.support.random_heads import MASK_TOKEN, HeadSpec

pytestmark = pytest.mark.arm("plugin-v1")


@pytest.fixture(scope="module", autouse=True)
def registered_plugin():
    plugin.register()


@pytest.fixture
def head(tmp_path: Path, target: Path) -> Path:
    return tiny_heads.write_head(tmp_path / "head", target, HeadSpec())


def configure(target: Path, head: Path, **changes):
    """vLLM's whole configuration for the pair; ``changes`` override entries of the speculative config."""
    from vllm.engine.arg_utils import EngineArgs

    engine = {key.removeprefix("engine_"): changes.pop(key) for key in list(changes) if key.startswith("engine_")}
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "parallel_drafting": True}
    speculative = {key: value for key, value in (speculative | changes).items() if value is not None}
    return EngineArgs(
        model=str(target), skip_tokenizer_init=True, dtype="float32", speculative_config=speculative, **engine
    ).create_engine_config()


def refusal(target: Path, head: Path, **changes) -> str:
    with pytest.raises(RefusedError) as refused:
        configure(target, head, **changes)
    line = str(refused.value)
    assert "\n" not in line and line.startswith("P-EAGLE refused: ")
    return line


def test_a_served_head_without_mask_token_id(target: Path, head: Path):
    from vllm.engine.arg_utils import EngineArgs

    name_target_on_hub(head, target)
    edit(head, lambda h: h.config.pop("mask_token_id"))
    with pytest.raises(RefusedError, match="no mask token id"):
        EngineArgs(model=str(head), skip_tokenizer_init=True).create_engine_config()


def test_a_head_that_was_corrected_is_taken_in_the_same_process(target: Path, head: Path):
    edit(head, lambda h: h.layer_config.update(rope_scaling={"rope_type": "odd"}))
    assert "odd" in refusal(target, head)
    edit(head, lambda h: h.layer_config.pop("rope_scaling"))
    assert configure(target, head)


def test_method_and_number_of_speculative_tokens_may_be_the_heads_own(target: Path, head: Path):
    """vLLM goes by the name of the head, and would take this one for EAGLE-1."""
    aws = tiny_heads.write_head(head.parent / "some-eagle-head", target, HeadSpec(fmt="aws"))
    edit(aws, lambda h: h.config.update(n_predict=4))
    config = configure(target, aws, method=None, num_speculative_tokens=None).speculative_config
    assert (config.method, config.parallel_drafting, config.num_speculative_tokens) == ("eagle3", True, 4)


def test_a_head_that_is_nowhere(target: Path, monkeypatch: pytest.MonkeyPatch):
    """In one line, before vLLM asks the hub again and again."""
    monkeypatch.setattr("vllm.config.speculative.ModelConfig", None)
    assert "not in the hub's cache, and HF_HUB_OFFLINE is set" in refusal(target, Path("no/such-head"))


def test_a_head_that_does_not_say_its_positions_has_the_targets(target: Path, head: Path):
    """vLLM would make a rotary embedding of 8,192 positions, whatever the target has."""
    edit(head, lambda h: h.layer_config.pop("max_position_embeddings"))
    config = configure(target, head).speculative_config
    positions = config.draft_model_config.hf_config.max_position_embeddings
    assert positions == config.target_model_config.max_model_len != 8192


@pytest.mark.parametrize(
    ("runner", "changes", "limit"),
    [
        ("V1", {}, "the V1 model runner allows 128"),
        ("V1", {"engine_max_model_len": 100}, "max_model_len 100 allows 98"),
        ("V2", {"engine_max_model_len": 400}, "max_model_len 400 allows 398"),
        ("V2", {"engine_max_num_batched_tokens": 300}, "max_num_batched_tokens 300 allows 150"),
    ],
)
def test_more_drafts_than_the_runner_verifies(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, runner: str, changes: dict, limit: str
):
    """Without Triton there is no configuration of V2: one of V1 is made, and checked again as V2's."""
    config, most = configure(target, head, **changes), int(limit.split()[-1])
    monkeypatch.setattr("vllm.config.VllmConfig.use_v2_model_runner", runner == "V2")
    config.speculative_config.num_speculative_tokens = most
    validation._check_whole(config)
    config.speculative_config.num_speculative_tokens = most + 1
    with pytest.raises(RefusedError, match=f"num_speculative_tokens is {most + 1}, and {limit} at most; lower it"):
        validation._check_whole(config)


@pytest.mark.parametrize(
    ("name", "is_v2", "says"),
    [
        ("prefill_context_parallel_size", False, "set it to 1"),
        ("decode_context_parallel_size", False, "set it to 1"),
        ("pipeline_parallel_size", True, r".*vLLM issue 52071"),
    ],
)
def test_parallelism(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_v2: bool, says: str):
    """vLLM's own checks of the CPU platform come later. Pipeline stages on V2 need asynchronous scheduling."""
    config = configure(target, head)
    monkeypatch.setattr("vllm.config.VllmConfig.use_v2_model_runner", is_v2)
    setattr(config.parallel_config, name, 2)
    config.scheduler_config.async_scheduling = False
    with pytest.raises(RefusedError, match=f"P-EAGLE refused: {name}=2 .*{says}"):
        validation._check_whole(config)
    config.scheduler_config.async_scheduling = True
    monkeypatch.setattr("vllm.config.VllmConfig.use_v2_model_runner", True)
    if name != "prefill_context_parallel_size":
        validation._check_whole(config)


@pytest.mark.parametrize("file", [{"min_p": 0.1}, {"min_p": 0, "top_k": 5}])
def test_defaults_of_the_target_that_vllm_refuses_with_speculation(tmp_path: Path, head: Path, file: dict, warned):
    """docs/serve.md has vLLM's own error; the corrected command serves."""
    target = tiny_heads.write_target(tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps(file | {"do_sample": True, "temperature": 0.7}))
    configure(target, head, engine_override_generation_config={"min_p": 0})
    assert not warned("min_p")
    configure(target, head)
    named = warned(f"generation_config.json of {target} sets min_p=0.1")
    assert len(named) == bool(file["min_p"])


@pytest.mark.parametrize("schedule", [[], [[2, 8, 3]], [[8, 1, 3]], [[1, 8, -1]], [[1, 8, 3], [5, 64, 1]]])
def test_a_bad_schedule(target: Path, head: Path, schedule: list):
    assert configure(target, head, num_speculative_tokens_per_batch_size=[[1, 8, 3], [9, 64, 1]])
    line = refusal(target, head, num_speculative_tokens_per_batch_size=schedule)
    assert "num_speculative_tokens_per_batch_size is [" in line and line.endswith("from 1 on")


def test_a_config_that_vllm_read_by_itself(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(head_config, "serving", lambda *_: nullcontext())
    assert "did not read the head's config through peagle-vllm" in refusal(target, head)


def test_the_method_by_its_name(target: Path, head: Path):
    line = refusal(target, head, method="P-EAGLE")
    assert line.endswith('"P-EAGLE" is not a method of vLLM; write "method": "eagle3", "parallel_drafting": true')


@pytest.mark.parametrize("value", [6, -1, "two", "2", True, 2.5])
@pytest.mark.parametrize("method", ["eagle3", None])
def test_a_bad_look_up(target: Path, head: Path, method: str | None, value: object):
    line = refusal(target, head, method=method, prompt_lookup_min=value)
    assert f'"prompt_lookup_min": {value!r} in the speculative config is no number of tokens from 0 to 5' in line


@pytest.mark.parametrize("method", ["eagle3", None])
@pytest.mark.parametrize(("asked", "settled"), [(None, lookup.DEFAULT), (0, 0), (1, 1), (5, 5)])
def test_a_look_up(target: Path, head: Path, asked: int | None, settled: int, method: str | None):
    """Also once the configuration has been sent to another process, and built around again."""
    config = pickle.loads(pickle.dumps(configure(target, head, prompt_lookup_min=asked, method=method)))
    validation._check_whole(config)
    assert prompt_lookup_min(config) == settled


def test_a_look_up_beside_what_it_would_harm(target: Path, head: Path, warned):
    """The default gives way, with a line in the log; an explicit number is refused."""
    for asked in (None, 0, 2):
        config = configure(target, head)
        config.speculative_config.draft_model_config.hf_config.prompt_lookup_min = asked
        config.speculative_config.enable_adaptive_verification = True
        if asked:
            with pytest.raises(RefusedError, match='"prompt_lookup_min": 2 with enable_adaptive'):
                validation._check_whole(config)
        else:
            validation._check_whole(config)
            assert prompt_lookup_min(config) == 0
    assert len(warned("no draft is looked up: adaptive verification judges the head's drafts only")) == 1
    config = configure(target, head)
    config.speculative_config.draft_model_config.hf_config.prompt_lookup_min = None
    config.speculative_config.rejection_sample_method = "fly"  # vLLM 0.33's
    validation._check_whole(config)
    assert prompt_lookup_min(config) == 0 and warned("no draft is looked up: rejection_sample_method=fly would")


def test_a_look_up_too_large_for_the_device(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, warned):
    """By default up to 1% of its memory; asked for, whatever it takes."""
    num_bytes = 8 * 192 * 4  # of requests, tokens, bytes
    sizes = {"engine_max_num_seqs": 8, "engine_max_model_len": 192}
    for memory, settled in ((100 * num_bytes, lookup.DEFAULT), (100 * num_bytes - 1, 0)):
        monkeypatch.setattr("vllm.platforms.current_platform.get_device_total_memory", lambda memory=memory: memory)
        assert prompt_lookup_min(configure(target, head, **sizes)) == settled
    assert prompt_lookup_min(configure(target, head, prompt_lookup_min=3, **sizes)) == 3
    monkeypatch.setattr("vllm.platforms.current_platform.get_device_total_memory", lambda: 1 / 0)  # it has no number
    assert prompt_lookup_min(configure(target, head, **sizes)) == lookup.DEFAULT
    (line,) = warned("max_num_seqs 8 x max_model_len 192 x 4 bytes")
    assert '"prompt_lookup_min": 2 in the speculative config turns it on' in line


def test_block_verification_is_refused_where_it_is_wrong(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch):
    says = "rejection_sample_method=block needs Model Runner V2, this engine runs V1"
    assert says in refusal(target, head, rejection_sample_method="block")
    config = configure(target, head)
    config.speculative_config.rejection_sample_method = "block"
    monkeypatch.setattr("vllm.config.VllmConfig.use_v2_model_runner", True)
    monkeypatch.setattr("vllm.v1.worker.gpu.sample.gumbel.spec_step_seed", None, raising=False)
    validation._check_whole(config)
    monkeypatch.delattr("vllm.v1.worker.gpu.sample.gumbel.spec_step_seed")
    with pytest.raises(RefusedError, match="block samples wrongly before"):
        validation._check_whole(config)


def test_a_rank_that_elastic_ep_adds_loads_the_head(target: Path, head: Path):
    """There vLLM makes the target's load config one of dummy weights."""
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    config = configure(target, head)
    config.parallel_config.enable_elastic_ep = True
    validation._check_whole(config)
    config.load_config.load_format = "dummy"
    assert get_draft_load_config(config).load_format == "auto"


def test_a_prompt_that_would_wait_for_ever(target: Path, head: Path):
    """vLLM's scheduler leaves room for K - 1 mask rows beside a prompt that it may not cut."""
    engine = {"engine_enable_chunked_prefill": False, "engine_max_model_len": 192}
    line = refusal(target, head, engine_max_num_batched_tokens=192, **engine)
    assert "max_num_batched_tokens is 192, and without chunked prefill the longest prompt needs 193; raise it" in line
    configure(target, head, engine_max_num_batched_tokens=193, **engine)


def test_a_backend_of_the_targets_latent_attention(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = configure(target, head)
    config.attention_config.backend = AttentionBackendEnum.CUTLASS_MLA
    validation._check_whole(config)  # V1 does not give the head the target's
    monkeypatch.setattr("vllm.config.VllmConfig.use_v2_model_runner", True)
    with pytest.raises(RefusedError, match=r'CUTLASS_MLA is .*; add "attention_backend": "FLASH_ATTN"'):
        validation._check_whole(config)
    config.attention_config.backend_per_kind = {"full_attention": AttentionBackendEnum.FLASH_ATTN}
    validation._check_whole(config)
    config.attention_config.backend_per_kind = {}
    config.speculative_config.attention_backend = AttentionBackendEnum.FLASH_ATTN
    validation._check_whole(config)


@pytest.mark.parametrize("load_format", ["auto", "pt", "mistral"])
def test_a_target_in_files_that_a_head_has_not(target: Path, head: Path, load_format: str):
    """vLLM would look for the head in such files, too, after it has loaded the target."""
    config = configure(target, head, engine_load_format=load_format)
    own = config.speculative_config.draft_load_config
    assert (own and own.load_format) == (None if load_format == "auto" else "auto")
    stated = {"load_format": "safetensors"}
    config = configure(target, head, engine_load_format=load_format, draft_load_config=stated)
    assert config.speculative_config.draft_load_config.load_format == "safetensors"


def test_a_yarn_embedding_that_is_too_short(target: Path, head: Path):
    yarn = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    edit(head, lambda h: h.layer_config.update(rope_parameters=yarn))
    line = refusal(target, head, engine_max_model_len=129)
    assert "gives the head 128 positions, max_model_len is 129" in line and "lower --max-model-len to 128" in line
    configure(target, head, engine_max_model_len=128)


def test_what_vllm_dislikes_in_a_head_is_one_line(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fault that our checks let pass: vLLM's page of text becomes a line that names the head's config."""
    head = tiny_heads.write_head(tmp_path / "aws", target, HeadSpec(fmt="aws"))
    edit(head, lambda h: h.config.update(quantization_config={"quant_method": "nobody_knows_it"}))
    edit(head, lambda h: h.tensors.update({"norm.weight": h.tensors["norm.weight"].to(torch.int8)}))
    monkeypatch.setattr(validation, "check_pair", lambda *_, **__: [])
    line = refusal(target, head)
    assert "vLLM cannot take the head's config (" in line and f"{head}/config.json" in line


@pytest.mark.parametrize(
    ("fmt", "name", "architecture", "method"),
    [
        ("aws", "aws", None, None),
        ("aws", "aws", "LlamaForCausalLM", None),
        ("aws", "aws", "LlamaEagle3DraftModel", None),
        ("aws", "some-eagle-head", None, None),
        ("speculators", "head", None, None),
        ("speculators", "head", None, "draft_model"),
        ("vllm", "head", "LlamaEagle3DraftModel", "eagle"),
        ("vllm", "head", "LlamaEagle3DraftModel", "eagle3"),
        ("vllm", "head", "PEagleDraftModel", None),
        ("vllm", "head", "PEagleDraftModel", "draft_model"),
    ],
)
def test_a_head_without_method_and_flag(
    target: Path, tmp_path: Path, fmt: str, name: str, architecture: str | None, method: str | None
):
    """vLLM would take a flat one for a draft model, for EAGLE-1 by its name, or for no model at all."""
    head = tiny_heads.write_head(tmp_path / name, target, HeadSpec(fmt=fmt))
    edit(head, lambda h: h.config.update(architectures=[architecture]) if architecture else None)
    line = refusal(target, head, method=method, parallel_drafting=None)
    assert f"{head} is a P-EAGLE head" in line and line.endswith('add "method": "eagle3", "parallel_drafting": true')


def test_a_draft_model_without_method_is_none_of_our_business(target: Path, tmp_path: Path):
    """An ordinary one, and PARD's, which runs without the flag too; a broken one ends in vLLM's own error."""
    draft = tiny_heads.write_target(tmp_path / "draft")
    assert configure(target, draft, method=None, parallel_drafting=None).speculative_config.method == "draft_model"
    edit(draft, lambda h: h.config.update(pard_token=MASK_TOKEN))
    for flag in (None, True):
        config = configure(target, draft, method=None, parallel_drafting=flag)
        assert config.speculative_config.method == "draft_model"
    edit(draft, lambda h: h.config.update(architectures=["Unknown"]))
    with pytest.raises(ValueError, match="Unknown"):
        configure(target, draft, method=None, parallel_drafting=None)


def test_what_else_is_wrong_with_a_head_without_flag_is_told(target: Path, head: Path):
    with pytest.raises(ValueError, match="draft_tensor_parallel_size"):
        configure(target, head, parallel_drafting=None, draft_tensor_parallel_size=3)


CODE = """
from pathlib import Path
from transformers import LlamaConfig
Path({ran!r}).touch()
class Own(LlamaConfig):
    pass
"""


@pytest.mark.parametrize("fmt", ["aws", "speculators"])
@pytest.mark.parametrize("trusted", [False, True])
def test_code_beside_a_head_is_not_run(fmt: str, trusted: bool, target: Path, tmp_path: Path):
    """Not where the target's code is trusted either: vLLM would give that trust to the head."""
    head = tiny_heads.write_head(tmp_path / fmt, target, HeadSpec(fmt=fmt))
    (head / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    edit(head, lambda h: h.config.update(auto_map={"AutoConfig": "own.Own", "AutoModel": "own.Own"}))
    config = configure(target, head, engine_trust_remote_code=trusted)
    assert config.model_config.trust_remote_code is trusted
    assert config.speculative_config.draft_model_config.trust_remote_code is False
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "model.pt"])
def test_pickled_weights_are_refused(name: str, target: Path, head: Path):
    (head / "model.safetensors").rename(head / name)
    assert f"no *.safetensors: {head}; pickled weights are never read" in refusal(target, head)


@pytest.mark.parametrize("fmt", ["aws", "speculators"])
def test_a_peagle_head_without_the_flag_is_warned_of(target: Path, tmp_path: Path, warned, fmt: str):
    head = tiny_heads.write_head(tmp_path / fmt, target, HeadSpec(fmt=fmt))
    configure(target, head, parallel_drafting=None)
    (warning,) = warned(str(head))
    assert "is served as EAGLE-3, one token a forward" in warning and 'add "parallel_drafting": true' in warning


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("name", ["peagle", "eagle3"])
def test_what_is_no_peagle_costs_no_file_and_no_request(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, method: str, name: str
):
    """Plain EAGLE-3, also of a head that was meant for P-EAGLE."""
    if method == "draft_model":
        head = tiny_heads.write_target(head.parent / "draft")
    elif name == "eagle3":
        edit(head, lambda h: (h.config.pop("mask_token_id"), h.config.update(speculators_model_type="eagle3")))
    monkeypatch.setattr(validation, "_find", None)  # in a folder, the cache or the hub
    config = configure(target, head, method=method, parallel_drafting=None)
    assert config.speculative_config.method == method


def other_platform(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """What a platform plugin does: its class, which is vLLM's for a CPU in all but its module, is the current one."""
    import vllm.platforms

    kind = type("Platform", (type(vllm.platforms.current_platform),), {"__module__": module})
    monkeypatch.setattr(vllm.platforms, "_current_platform", kind())


@pytest.mark.parametrize("method", ["eagle3", None])
def test_another_platform_is_left_alone(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, method: str | None):
    """vllm-ascend, for one: its runner is not ours, so nothing is read, checked, opened, extended or replaced."""
    other_platform(monkeypatch, "vllm_ascend.platform")
    monkeypatch.setattr(validation, "_find", None)
    config = configure(target, head, method=method)
    assert config.speculative_config.parallel_drafting and not is_peagle(config)
    unsupported = config._get_v2_model_runner_unsupported_features()
    assert "parallel drafting for EAGLE speculative decoding" in unsupported


def test_another_platform_loads_heads_by_itself(monkeypatch: pytest.MonkeyPatch):
    """What vLLM's own would refuse, and drop, reaches the class as it is."""
    body = {"load_weights": lambda self, weights: [*weights], "use_parallel_drafting": True}
    body |= {"config": None, "lm_head": None, "model": SimpleNamespace(embed_tokens=None)}
    module = ModuleType("vllm.model_executor.models.llama_eagle3")
    head = module.Eagle3LlamaForCausalLM = type("Head", (), body | {"draft_id_to_target_id": None})
    next(hook for name, hook in head_weights.PATCH.hooks if name == module.__name__)(module)
    weights = [("model.d2t", torch.tensor([float("nan")]))]
    with pytest.raises(RefusedError):
        head().load_weights(weights)
    other_platform(monkeypatch, "vllm_ascend.platform")
    assert head().load_weights(weights) == weights


@pytest.fixture
def a_new_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of its own, what is logged and checked once a start is logged and checked again."""
    monkeypatch.delenv("PEAGLE_VLLM_ACCEPT", raising=False)
    patches.refuse_if_changed.cache_clear()
    yield
    patches.refuse_if_changed.cache_clear()


@pytest.fixture
def changed(a_new_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that differs from every recorded one at two patches."""
    recorded = fingerprint.load_recorded()
    for build in (build for builds in recorded.values() for build in builds.values()):
        for name in ("vllm.v1.spec_decode.eagle:EagleProposer", "vllm.utils.cpu_triton_utils:_expand_kernel_impl"):
            assert name in build
            build[name] = "0" * 16  # type: ignore[index]
    monkeypatch.setattr(fingerprint, "load_recorded", lambda: recorded)


@pytest.mark.usefixtures("changed")
def test_a_changed_patch(target: Path, head: Path):
    """P-EAGLE is refused by name; the same target without it is configured as ever."""
    line = refusal(target, head)
    assert "differs from what peagle-vllm was checked against at the patch v1-proposer, cpu-sampling" in line
    assert "PEAGLE_VLLM_ACCEPT=v1-proposer,cpu-sampling serves it all the same" in line

    from vllm.engine.arg_utils import EngineArgs

    EngineArgs(model=str(target), skip_tokenizer_init=True).create_engine_config()


@pytest.mark.usefixtures("changed")
def test_a_changed_patch_is_let_in_by_name(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, warned):
    monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", "v1-proposer")
    assert "at the patch cpu-sampling;" in refusal(target, head)
    monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", "cpu-sampling, v1-proposer,gate")
    for _ in range(2):
        assert configure(target, head).speculative_config.parallel_drafting
    (warning,) = warned("PEAGLE_VLLM_ACCEPT")
    assert "at the patch v1-proposer, cpu-sampling" in warning and "gate" not in warning


@pytest.mark.usefixtures("a_new_start")
def test_what_is_gone_cannot_be_accepted(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch):
    def digest(self: Source, definition: Definition) -> str | None:
        return None if definition.qualname.endswith("_input_fits_in_drafter") else whole(self, definition)

    whole = Source._digest
    monkeypatch.setattr(Source, "_digest", digest)
    monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", "drafter-limit")
    line = refusal(target, head)
    assert "at the patch drafter-limit;" in line
    assert line.endswith("GPUModelRunner._input_fits_in_drafter is gone, so PEAGLE_VLLM_ACCEPT does not help")


def test_a_patch_that_does_not_fit_leaves_vllm_alone(warned):
    """A vLLM without what a patch wraps: the import goes on, and says so."""
    ((name, hook),) = drafter_limit.PATCH.hooks
    for each in (hook, lambda _: import_module("vllm.gone")):
        patches._install(drafter_limit.PATCH, each, ModuleType(name))
    assert len(warned("the patch drafter-limit does not fit this vLLM")) == 2
