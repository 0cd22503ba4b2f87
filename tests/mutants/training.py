"""Breaks of training: the step in parts, a run that goes on, its data, and replay."""

from tests.mutants.mutation import Mutation

PARTITION = "src/peagle_tools/train/partition.py"
TRAINED = "src/peagle_tools/train/head.py"
TRAINER = "src/peagle_tools/train/trainer.py"
SAVED = "src/peagle_tools/train/checkpoints.py"
REPLAY = "src/peagle_tools/train/replay.py"
PROMPTS = "src/peagle_tools/train/prompts.py"
PIPELINE = "src/peagle_tools/train/pipeline.py"
STEPS = "src/peagle_tools/train/steps.py"
STEP = "tests/train/test_partition.py::test_a_step_in_parts_is_the_flat_step[llama-{}-packed-8-7-all-fp64]"
RESUMED = "tests/train/test_run.py::test_a_signal_saves_the_step_it_comes_in"
REPLAYED = "tests/train/test_replay.py::test_acceptance_is_what_vllm_counted"
PERSONAL = "tests/train/test_prompts.py::test_planted_personal_data_is_found"
FAILED = "tests/train/test_steps.py::test_requests_that_failed_are_sent_again_while_that_helps"
NEAR = "tests/train/test_prompts.py::test_what_is_near_to_a_measured_prompt_is_dropped"
LOOPING = "tests/train/test_steps.py::test_an_answer_that_loops_is_no_document"
SELECTOR = "src/peagle_tools/train/selector.py"
SELECTED = "tests/train/test_selector.py::test_a_step_in_parts_is_the_whole_formula[7-20-ratio4]"
SERVED = "tests/train/test_selector.py::test_a_checkpoint_is_served_with_its_selector"
BEGUN = "tests/train/test_pipeline.py::test_other_settings_are_refused_until_the_step_is_done_again"

TRAINING = (
    # The training step in parts.
    Mutation(
        "partition: keys and values keep the gradients of their first chunk only",
        PARTITION,
        "if gradient is not None:",
        "if gradient is not None and not (so_far.ndim == 4 and so_far.any()):",
        STEP.format("full"),
    ),
    Mutation(
        "partition: mask rows stop before their anchor",
        PARTITION,
        "anchor = torch.cat([real, rows.anchor])",
        "anchor = torch.cat([real, rows.anchor - (rows.depth > 0).long()])",
        STEP.format("full"),
    ),
    Mutation(
        "partition: own rows outside the window are not seen",
        PARTITION,
        "seen = sees(None, None, key[len(real) :, None], key)",
        "seen = sees(None, None, key[len(real) :, None], key)\n"
        "        seen &= (anchor + depth)[len(real) :, None] - (anchor + depth) < (window or len(self.ids))",
        STEP.format("sliding"),
    ),
    Mutation(
        "partition: the loss is a mean over each chunk",
        TRAINED,
        "return loss * share",
        "return loss",
        STEP.format("full"),
    ),
    Mutation(
        "partition: the embedding of the mask token gets its gradient twice",
        TRAINED,
        "states, mask_row = inputs[:, :num_tokens], inputs[:, num_tokens:]",
        "states, mask_row = inputs[:, :num_tokens], 2 * inputs[:, num_tokens:] - inputs[:, num_tokens:].detach()",
        STEP.format("full"),
    ),
    # The selector that is trained with its head.
    Mutation(
        "selector: its gradients are dropped",
        TRAINED,
        "output += self.candidate_selector.parameters()",
        "pass",
        SELECTED,
    ),
    Mutation(
        "selector: taken before the last norm", TRAINED, "of_selector(hidden[0]", "of_selector(states[0]", SELECTED
    ),
    Mutation(
        "selector: the predecessor is one token off",
        SELECTOR,
        "self.input_ids[rows.position], ids",
        "self.input_ids[rows.position - 1], ids",
        SELECTED,
    ),
    Mutation(
        "selector: a right token that is no candidate is not put in",
        SELECTOR,
        "ids, place, found = selector_training_candidates(best, truth.clamp(min=0))",
        "(_, place, found), ids = selector_training_candidates(best, truth.clamp(min=0)), best",
        SELECTED,
    ),
    Mutation(
        "selector: its loss is a mean over all supervised rows",
        SELECTOR,
        "(following[rows.position] >= 0).sum()",
        "(loss_mask[0, rows.position] != 0).sum()",
        SELECTED,
    ),
    Mutation(
        "selector: the first token of a document follows the one before it",
        SELECTOR,
        "(documents.ids[1:] == documents.ids[:-1]) & ",
        "",
        SELECTED,
    ),
    Mutation(
        "selector: its tables decay",
        SELECTOR,
        '"weight_decay": 0.0',
        '"weight_decay": options.weight_decay',
        "tests/train/test_selector.py::test_a_selector_has_its_own_rate_and_no_weight_decay[adamw]",
    ),
    Mutation(
        "selector: replay keeps the head's own drafts",
        SELECTOR,
        "return out\n",
        "return out.where(out < 0, self.ids[..., 0])\n",
        "tests/train/test_replay.py::test_a_selectors_drafts_are_walked[all-tokens]",
    ),
    Mutation(
        "checkpoint: vLLM reads the selector among the head's weights",
        SAVED,
        '(begun / INDEX).write_text(json.dumps(index, indent=2) + "\\n")',
        "pass",
        SERVED,
    ),
    # A run that goes on.
    Mutation(
        "resume: what a step samples depends on the steps before it",
        TRAINER,
        "torch.manual_seed(self.settings.optimizer.seed + step)",
        "pass",
        RESUMED,
    ),
    Mutation(
        "resume: weights and optimizer saved in bfloat16",
        SAVED,
        "name, torch.float32)",
        "name, torch.bfloat16)",
        RESUMED,
    ),
    Mutation(
        "resume: the epoch begins again",
        TRAINER,
        'state.get("epoch", 0), state.get("local_step", 0)',
        'state.get("epoch", 0), 0',
        RESUMED,
    ),
    # Data of a training run, and acceptance without a server.
    Mutation(
        "replay: draft ids taken for the target's",
        REPLAY,
        "best if head.d2t is None else best + head.d2t[best]",
        "best",
        f"{REPLAYED}[reduced-vocabulary]",
    ),
    Mutation(
        "replay: what the text does not tell counts as refused",
        REPLAY,
        "(1 if is_whole else num)",
        "1",
        f"{REPLAYED}[all-tokens]",
    ),
    Mutation(
        "replay: a round begins one token late",
        REPLAY,
        "at += lengths[at] + 1",
        "at += lengths[at] + 2",
        f"{REPLAYED}[all-tokens]",
    ),
    Mutation("prompts: phone numbers are not looked for", PROMPTS, '"PhoneRecognizer", ', "", PERSONAL),
    Mutation("prompts: the list of domains is fetched", PROMPTS, "suffix_list_urls=(), ", "", PERSONAL),
    Mutation(
        "prompts: only the first turn of a measured prompt counts",
        PROMPTS,
        "for row in measured for turn in _said_by_users(row)]",
        "for row in measured for turn in _said_by_users(row)[:1]]",
        NEAR,
    ),
    Mutation("prompts: near is half of the longer text", PROMPTS, "NEAR * min(", "NEAR * max(", NEAR),
    Mutation(
        "data: a prompt that loops is taken for its answer", STEPS, "strict=True) if mask]", "strict=True)]", LOOPING
    ),
    Mutation(
        "pipeline: settings are noted at a step's end only",
        PIPELINE,
        '"versions": used_now}\n            _write(stamp, found)',
        '"versions": used_now}',
        BEGUN,
    ),
    # The target's dtype and the step's; requests that fail.
    Mutation(
        "hidden states: stamped with the step's dtype",
        "src/peagle_tools/train/config.py",
        "name, dtype = Path(self.target).name, self.target_dtype",
        "name, dtype = Path(self.target).name, self.step.dtype",
        "tests/train/test_pipeline.py::test_the_steps_dtype_leaves_answers_and_hidden_states_as_they_are",
    ),
    Mutation(
        "pipeline: answers depend on the step's dtype",
        PIPELINE,
        "config.target, config.target_dtype, engine,",
        "config.target, config.step.dtype, engine,",
        "tests/train/test_pipeline.py::test_the_steps_dtype_leaves_answers_and_hidden_states_as_they_are",
    ),
    Mutation(
        "hidden states: refused for the step's dtype",
        "src/peagle_tools/train/documents.py",
        'if config.data.backend == "fp8" else config.target_dtype',
        'if config.data.backend == "fp8" else config.step.dtype',
        "tests/train/test_run.py::test_hidden_states_of_another_dtype_than_the_steps_train",
    ),
    Mutation(
        "hidden states: requests that failed are not sent again",
        STEPS,
        "if len(left) == before:",
        "if left:",
        FAILED,
    ),
    Mutation(
        "hidden states: requests are sent again without an end",
        STEPS,
        "if len(left) == before:",
        "if not left:",
        FAILED,
    ),
    Mutation(
        "hidden states: a time-out has no reason in the log",
        STEPS,
        '"peagle_tools.train.library"',
        '"speculators"',
        "tests/train/test_steps.py::test_a_request_without_an_answer_has_a_reason_in_the_log",
    ),
    Mutation(
        "sharpen: a CPU's KV cache for one request",
        "src/peagle_tools/shared/engines.py",
        "(num_reqs * blocks + 1)",
        "(blocks + 1)",
        "tests/sharpen/test_record.py::test_a_cpus_memory_is_taken_for_these_requests_only",
    ),
)
