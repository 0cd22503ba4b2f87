"""Breaks of what reads, checks, converts and diagnoses heads."""

from tests.mutants.mutation import Mutation

SELECT = "kernels/peagle_kernels/select_candidates.py"
SELECTOR_FOLDER = "src/peagle_vllm/sampling/selector.py"
V1 = "src/peagle_vllm/v1/proposer.py"
HEAD_FIELDS = "src/peagle_vllm/heads/config.py"
CONVERT = "src/peagle_vllm/heads/convert.py"
HEAD = "src/peagle_vllm/heads/head.py"
LOADED = "src/peagle_vllm/serving.py"
HEAD_CONFIG = "src/peagle_vllm/patches/head_config.py"
DIAGNOSE = "src/peagle_tools/diagnose/cli.py"
APPLY = "src/peagle_tools/diagnose/engine.py"
INSPECT = "src/peagle_tools/inspect/cli.py"
FILES = "src/peagle_vllm/heads/files.py"
CHECKS = "src/peagle_vllm/heads/checks.py"
SHARPENED = "tests/drafts/test_basics.py::test_decoding_of_a_sharpened_head"
DIALECT = "tests/drafts/test_dialects.py::test_drafts_of_a_dialect"
THERE_AND_BACK = "tests/inspect/test_convert.py::test_there_and_back_changes_no_tensor"
STOCK_FINDS = "tests/inspect/test_convert.py::test_stock_vllm_finds_everything_in_the_result"
DRAWN = "tests/kernels/test_select_candidates.py::test_drawing_leaves_the_q_of_this_step_and_nothing_else"
INTERRUPTED = "tests/diagnose/test_faults.py::test_what_was_measured_before_an_interrupt_is_shown[4]"
UNDONE = "tests/diagnose/test_apply.py::test_each_change_moves_the_drafts_and_is_undone"
UNFIT = "tests/inspect/test_inspect.py::test_a_foreign_target_is_unfit"
LOGS = "tests/features/test_logs.py::test_prompts_and_answers_stand_in_no_log"
TRUST = "tests/patches/refusals/test_trust.py"
LOCATE = "tests/heads/test_locate.py"

HEADS = (
    Mutation(
        "offline, vLLM looks for a head that was never fetched",
        FILES,
        "str):\n            return None\n        if constants.HF_HUB_OFFLINE:",
        "str):\n            return None\n        if False:",
        f"{LOCATE}::test_offline_only_the_cache_is_left",
    ),
    Mutation(
        "a folder that is not there is taken for a name on the hub",
        FILES,
        "hub.model_info(model, revision=revision, timeout=5)",
        "pass",
        f"{LOCATE}::test_beside_a_folder_of_this_name_the_hub_is_asked_once",
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
        "target ids are taken for offsets",
        HEAD,
        'VocabularyMap("target ids", as_ids, fault)',
        'VocabularyMap("target ids", as_offsets, fault)',
        "tests/inspect/test_convert.py::test_target_ids_become_offsets",
    ),
    Mutation(
        "convert forgets the window",
        CONVERT,
        "    return fields\n",
        '    return {k: v for k, v in fields.items() if k != "layer_types"}\n',
        f"{DIALECT}[speculators-window]",
    ),
    Mutation(
        "convert forgets norm_before_residual",
        CONVERT,
        "        **norms,\n",
        '        **norms | {"norm_before_residual": False},\n',
        f"{DIALECT}[speculators-bare]",
    ),
    Mutation(
        "convert swaps two weights",
        CONVERT,
        "_pieces(head, name, on_write)",
        '_pieces(head, name.replace("gate_", "up_"), on_write)',
        THERE_AND_BACK,
    ),
    Mutation(
        "convert leaves the count of aux states out",
        CONVERT,
        'layers |= {"num_aux_hidden_states": needed} if needed != 3 else {}',
        "pass",
        STOCK_FINDS,
    ),
    Mutation(
        "Inf in a projection is served",
        LOADED,
        "if not _is_finite(weight):",
        "if weight.isnan().any():",
        "tests/drafts/test_mutations.py",
    ),
    Mutation(
        "selector: the predecessor is the token before the last",
        SELECT,
        "selector.predecessor_codebook[previous].float()",
        "selector.predecessor_codebook[out[:, column - 2] if column > 1 else previous].float()",
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
    Mutation("selector: every position has the first one's gate", SELECT, "gates[:, column]", "gates[:, 0]", SHARPENED),
    Mutation(
        "selector: q keeps the candidates of the step before",
        SELECT,
        'tl.store(q + tl.load(cached, mask=kept, other=0), float("-inf"), mask=kept)',
        "tl.load(cached, mask=kept, other=0)",
        DRAWN,
        "kernels",
    ),
    Mutation("selector: two writes of q race", SELECT, "tl.debug_barrier()", "pass", DRAWN, "kernels"),
    Mutation(
        "selector: logits are read past their end",
        SELECT,
        "tl.load(logits_ptr + candidate, mask=is_candidate, other=0.0)",
        "tl.load(logits_ptr + candidate)",
        DRAWN,
        "kernels",
    ),
    # Trust.
    Mutation(
        "a header that names a tensor twice is read",
        FILES,
        "object_pairs_hook=_once_each",
        "object_pairs_hook=dict",
        "tests/heads/test_reader.py::test_a_name_that_stands_there_twice",
    ),
    Mutation(
        "a head gets its target's trust",
        HEAD_CONFIG,
        "target.trust_remote_code, False",
        "target.trust_remote_code, target.trust_remote_code",
        f"{TRUST}::test_code_beside_a_head_is_not_run",
    ),
    Mutation("pickled weights are served", CHECKS, "    if _is_pickled(head):", "    if False:", TRUST),
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
    # Tools.
    Mutation(
        "diagnose leaves the last rope that it tried",
        APPLY,
        "rope if setup.rope is None else",
        "attention.rotary_emb if setup.rope is None else",
        UNDONE,
    ),
    Mutation(
        "diagnose writes --out at the end only",
        DIAGNOSE,
        "measured_at[0])\n        keep(found)\n",
        "measured_at[0])\n",
        INTERRUPTED,
    ),
    Mutation(
        "inspect exits 0 for an unfit head", INSPECT, 'typer.Exit(0 if data["fit"] else 1)', "typer.Exit(0)", UNFIT
    ),
)
