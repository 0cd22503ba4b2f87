"""Breaks of what reads, checks, converts and serves heads."""

from tests.mutants.mutation import Mutation

SELECT = "kernels/peagle_kernels/select_candidates.py"
SELECTOR_FOLDER = "src/peagle_vllm/sampling/selector.py"
V1 = "src/peagle_vllm/v1/proposer.py"
HEAD_FIELDS = "src/peagle_vllm/heads/config.py"
CONVERT = "src/peagle_vllm/heads/convert.py"
LOADED = "src/peagle_vllm/serving.py"
HEAD_CONFIG = "src/peagle_vllm/patches/head_config.py"
CHECKS = "src/peagle_vllm/heads/checks.py"
SHARPENED = "tests/drafts/test_basics.py::test_decoding_of_a_sharpened_head"
DIALECT = "tests/drafts/test_dialects.py::test_drafts_of_a_dialect"
DRAWN = "tests/kernels/test_select_candidates.py::test_drawing_leaves_the_q_of_this_step_and_nothing_else"
LOGS = "tests/features/test_logs.py::test_prompts_and_answers_stand_in_no_log"
REFUSALS = "tests/patches/refusals/test_refusals.py"

HEADS = (
    Mutation(
        "a folder that is not there is taken for a name on the hub",
        "src/peagle_vllm/heads/files.py",
        "hub.model_info(model, revision=revision, timeout=5)",
        "pass",
        "tests/heads/test_locate.py::test_beside_a_folder_of_this_name_the_hub_is_asked_once",
    ),
    Mutation(
        "target ids are taken for offsets",
        "src/peagle_vllm/heads/head.py",
        'VocabularyMap("target ids", as_ids, fault)',
        'VocabularyMap("target ids", as_offsets, fault)',
        "tests/inspect/test_convert.py::test_target_ids_become_offsets",
    ),
    Mutation(
        "convert swaps two weights",
        CONVERT,
        "_pieces(head, name, on_write)",
        '_pieces(head, name.replace("gate_", "up_"), on_write)',
        "tests/inspect/test_convert.py::test_there_and_back_changes_no_tensor",
    ),
    # Heads: what serving maps, and what convert writes.
    Mutation("names keep model.", HEAD_FIELDS, 'name.removeprefix("model.")', "name", f"{DIALECT}[nemo]"),
    Mutation("mapped fields are not set", HEAD_CONFIG, "hf_config.update(dict(fields))", "pass", f"{DIALECT}[nemo]"),
    Mutation(
        "aux layers inside eagle_config are forgotten",
        HEAD_FIELDS,
        "fields[AUX_KEY] = list(ids)",
        "fields[AUX_KEY] = [1, 3, 5]",
        f"{DIALECT}[specforge-with-id]",
    ),
    Mutation(
        "fc_norm of a speculators head is dropped",
        HEAD_FIELDS,
        'config.get("fc_norm") is True',
        'config.get("fc_norm") is None',
        f"{DIALECT}[speculators-5-aux]",
    ),
    Mutation(
        "convert forgets the window",
        CONVERT,
        "    return fields\n",
        '    return {k: v for k, v in fields.items() if k != "layer_types"}\n',
        f"{DIALECT}[speculators-window]",
    ),
    Mutation(
        "Inf in a projection is served",
        LOADED,
        "if not _is_finite(weight):",
        "if weight.isnan().any():",
        "tests/drafts/test_dialects.py::test_a_weight_with_nan_or_inf_is_refused_when_it_is_loaded",
    ),
    Mutation(
        "selector: the predecessor is the token before the last",
        SELECT,
        "F.embedding(previous, selector.predecessor_codebook)",
        "F.embedding(out[:, column - 2] if column > 1 else previous, selector.predecessor_codebook)",
        SHARPENED,
    ),
    Mutation(
        "selector: no bonus token",
        SELECT,
        "previous = candidates.input_ids[candidates.sample_indices[::num_k]]",
        "previous = candidates.input_ids[candidates.sample_indices[::num_k] + 1]",
        SHARPENED,
    ),
    Mutation(
        "selector: a candidate too few",
        SELECTOR_FOLDER,
        "num_candidates=selector_config.selector_top_k,",
        "num_candidates=selector_config.selector_top_k - 1,",
        SHARPENED,
    ),
    Mutation("selector: every position has the first one's gate", SELECT, "gates[column]", "gates[0]", SHARPENED),
    Mutation(
        "selector: q keeps the candidates of the step before",
        SELECT,
        'tl.store(q + tl.load(cached, mask=kept, other=0), float("-inf"), mask=kept)',
        "tl.load(cached, mask=kept, other=0)",
        DRAWN,
    ),
    Mutation("selector: top-p keeps all", SELECT, "kept & (is_best | (before < mass))", "kept", DRAWN),
    Mutation(
        "selector: top-p at another temperature",
        SELECT,
        "scores / tl.where(temperature == 0.0, 1.0, temperature)",
        "scores",
        DRAWN,
    ),
    Mutation(
        "selector: limits stay those of capture time",
        "src/peagle_vllm/v2/speculator.py",
        "top_k=self.sampling_states.top_k.gpu",
        "top_k=self.buffers.top_k",
        "tests/sampling/test_follows_target.py::test_drafts_are_within_the_limits",
    ),
    Mutation("selector: two writes of q race", SELECT, "tl.debug_barrier()", "pass", DRAWN),
    Mutation(
        "selector: logits are read past their end",
        SELECT,
        "tl.load(logits_ptr + candidate, mask=is_candidate, other=0.0)",
        "tl.load(logits_ptr + candidate)",
        DRAWN,
    ),
    # Trust.
    Mutation(
        "a head gets its target's trust",
        HEAD_CONFIG,
        "target.trust_remote_code, False",
        "target.trust_remote_code, target.trust_remote_code",
        f"{REFUSALS}::test_code_beside_a_head_is_not_run",
    ),
    Mutation(
        "pickled weights are served",
        CHECKS,
        "    if _is_pickled(head):",
        "    if False:",
        f"{REFUSALS}::test_pickled_weights_are_refused",
    ),
    Mutation(
        "the log holds prompts",
        V1,
        "        next_token_ids, num_valid = super()",
        "        import logging\n\n"
        "        tokens = [request.prompt_token_ids for request in requests.values()]\n"
        '        logging.getLogger("vllm.peagle").debug("next tokens of %s", tokens)\n'
        "        next_token_ids, num_valid = super()",
        LOGS,
    ),
)
