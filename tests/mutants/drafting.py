"""Breaks of what drafts: geometry, kernels, both runners, windows and KV cache groups."""

from tests.mutants.mutation import DECODING, Mutation

GEOMETRY = "kernels/peagle_kernels/geometry.py"
EXPAND = "kernels/peagle_kernels/prepare_inputs.py"
KERNEL = "kernels/peagle_kernels/prepare_inputs_parts.py"
PREPARE = "kernels/peagle_kernels/prepare_inputs_kernel.py"
BROADCAST = "kernels/peagle_kernels/gather_hidden.py"
GREEDY = "src/peagle_vllm/sampling/greedy.py"
SELECT = "kernels/peagle_kernels/select_candidates.py"
LOOK_UP = "kernels/peagle_kernels/lookup_drafts.py"
LIMIT_LOGITS = "kernels/peagle_kernels/limit_logits.py"
V1 = "src/peagle_vllm/v1/proposer.py"
HISTORY = "src/peagle_vllm/v1/history.py"
V2 = "src/peagle_vllm/v2/speculator.py"
GRAPH = "src/peagle_vllm/v2/cudagraph.py"
LOADED = "src/peagle_vllm/serving.py"
LIMIT = "src/peagle_vllm/patches/drafter_limit.py"
CAPTURE = "src/peagle_vllm/patches/capture_range.py"
UPDATES = "src/peagle_vllm/updates.py"
ATTENTION = "src/peagle_vllm/v2/attention.py"
FAILED_UPDATE = "tests/features/test_weight_update.py::test_after_a_failure_nothing_is_drafted_until_an_update_is_whole"
ACCEPTED = "tests/drafts/test_basics.py::test_every_draft_accepted"
CHUNKED = "tests/drafts/test_basics.py::test_chunked_prefill_beside_decoding"
END = "tests/drafts/test_basics.py::test_next_to_max_model_len"
DYNAMIC = "tests/drafts/test_basics.py::test_fewer_drafts_some_steps"
SEEDED = "tests/drafts/test_basics.py::test_seeded_probabilistic_drafts_belong_to_their_request"
EXPAND_TWIN = "tests/kernels/test_prepare_inputs.py::test_twin_equals_a_loop_over_requests"
KERNEL_TEST = "tests/kernels/test_prepare_inputs.py::test_kernel_equals_twin_and_writes_every_element"
REPLAYED = "tests/v2/test_graph.py::test_drafts_of_a_replayed_graph[3]"
STALE = "tests/v2/test_graph.py::test_nothing_in_captured_metadata_grows_stale"
READS = "tests/v2/test_graph.py::test_metadata_before_a_replay_reads_back_what_its_backend_reads[rebuilt]"
MIXED = "tests/v2/test_graph.py::test_batches_with_a_prefill_draft_from_piecewise_graphs[chunked-3]"
WITHOUT = "tests/v2/test_graph.py::test_every_depth_uses_the_graph_there_is"
LOOKED_UP = "tests/drafts/test_basics.py::test_drafts_looked_up"
LOOK_UP_TEST = "tests/kernels/test_lookup_drafts.py"
TOLD = (
    "tests/sampling/test_follows_target.py::test_sampled_tokens_follow_the_target[probabilistic, sharpened, looked up]"
)
BROADCAST_TEST = "tests/kernels/test_gather_hidden.py"
MISTRAL = "tests/drafts/test_targets.py::test_drafts_for_a_target[mistral-5]"
PROFILE = "tests/v2/test_dummy_runs.py::test_the_profile_run_compiles_the_drafter"
CAPTURED = "tests/patches/test_capture_range.py"
FUZZ = "tests/drafts/test_fuzz.py::test_drafts_and_output"

DRAFTING = (
    # The six of the design notes.
    Mutation(
        "rejected rows write KV",
        GEOMETRY,
        "is_valid = (offset >= 0) & (after_last <= 0)",
        "is_valid = offset >= 0",
    ),
    Mutation("mask_hidden is zero", V1, "return m\n", "return torch.zeros_like(m)\n"),
    Mutation("seq_lens one too short", EXPAND, "= win.seq_len\n", "= win.seq_len - 1\n"),
    Mutation(
        "mask rows one position too far",
        GEOMETRY,
        "return Rows(req, position, is_valid, is_mask, offset)",
        "return Rows(req, position + is_mask, is_valid, is_mask, offset)",
    ),
    Mutation(
        "rejections ignored",
        GEOMETRY,
        "num_valid = end - start - num_rejected",
        "num_valid = end - start",
    ),
    Mutation("tokens not shifted", EXPAND, "(staged_row + 1).clamp(", "staged_row.clamp("),
    # More of the geometry.
    Mutation(
        "sampled rows one too far",
        GEOMETRY,
        "row = (win.p_last - win.base)[:, None] + i",
        "row = (win.p_last - win.base)[:, None] + i + 1",
    ),
    Mutation(
        "seq_lens without the min with max_model_len",
        EXPAND,
        "= win.seq_len\n",
        "= lib.maximum(win.seq_len, win.p_last + num_k)\n",
        END,
    ),
    Mutation(
        "a step without drafts drops the bonus row",
        GEOMETRY,
        "max(num_speculative_tokens, 1)\n",
        "num_speculative_tokens\n",
        DYNAMIC,
    ),
    Mutation("rows before the window write KV", GEOMETRY, "is_valid = (offset >= 0) &", "is_valid = (offset >= -1) &"),
    Mutation(
        "slot in the wrong place of its block",
        GEOMETRY,
        "slot = position + (block",
        "slot = (position ^ 1) + (block",
    ),
    Mutation("block 0 written", GEOMETRY, "writes_kv & (block > 0)", "writes_kv", EXPAND_TWIN),
    Mutation("mask token is 0", V1, "=self.parallel_drafting_token_id,", "=0,"),
    Mutation(
        "bonus token of another request",
        EXPAND,
        "torch.where(rows.position == win.p_last[rows.req], bonus[rows.req],",
        "torch.where(rows.position == win.p_last[rows.req], bonus.roll(1)[rows.req],",
    ),
    # V1's own duties.
    Mutation("last prompt token after a chunk", V1, "if len(partial):", "if False:", CHUNKED),
    Mutation("no drafts beside a request at its end", LIMIT, "if drafts_on and", "if False and", END),
    Mutation(
        "rejections never reach prepare_inputs",
        V1,
        "self._none_rejected if num_rejected_tokens_gpu is None else num_rejected_tokens_gpu",
        "self._none_rejected",
    ),
    Mutation(
        "V1: the target's full graphs grow with the drafter's piecewise ones",
        CAPTURE,
        "if key.num_tokens > sizes[-1]])",
        "if False])",
        f"{CAPTURED}::test_full_graphs_keep_vllms_sizes_and_piecewise_ones_reach_the_drafts",
    ),
    Mutation(
        "V1: attention builders make room for splits of every draft batch",
        CAPTURE,
        "self.compilation_config = copy.copy(config)",
        "self.compilation_config = config",
        f"{CAPTURED}::test_split_kv_takes_what_it_takes_without_the_patch",
    ),
    # V2 and the kernels, under the interpreter.
    Mutation(
        "static window one row short",
        GEOMETRY,
        "return max_speculative_tokens + num_appended",
        "return max_speculative_tokens - 1 + num_appended",
        ACCEPTED,
        "plugin-v2",
    ),
    Mutation(
        "aux hidden states in reverse order",
        V2,
        "tuple(aux_hidden_states),",
        "tuple(reversed(aux_hidden_states)),",
        DECODING,
    ),
    Mutation(
        "kernel: bonus row takes the shifted token",
        KERNEL,
        "is_bonus = is_valid & (position == p_last)",
        "is_bonus = is_valid & (position == p_last + 1)",
        DECODING,
        "plugin-v2",
    ),
    Mutation(
        "kernel: staging keeps the wrong rows",
        KERNEL,
        "source_row = start + j",
        "source_row = end - 1 - j",
        DECODING,
        "plugin-v2",
    ),
    Mutation(
        "kernel: chunk ends take the sampled token",
        KERNEL,
        "bonus + prefill + shifted",
        "bonus + shifted",
        CHUNKED,
        "plugin-v2",
    ),
    Mutation(
        "kernel: draws with another request's seed",
        KERNEL,
        "idx = tl.load(target.idx_mapping + req, mask=live, other=-1).to(tl.int64)\n    for",
        "idx = tl.load(target.idx_mapping + num_reqs - 1 - req, mask=live, other=-1).to(tl.int64)\n    for",
        SEEDED,
        "plugin-v2",
    ),
    Mutation(
        "graph: mask_hidden's row of staging is not filled",
        V2,
        "run.fc_inputs[0].copy_(self.model.mask_hidden.view(-1))",
        "pass",
        REPLAYED,
    ),
    Mutation(
        "graph: a step without drafts asks for a shape that no graph has",
        GRAPH,
        "shape[1] >= length",
        "shape[1] == length",
        WITHOUT,
    ),
    Mutation(
        "graph: the backend's own block table is the one of capture time",
        V2,
        "self.attention.map_kernel_block_tables(num_reqs)",
        "pass",
        STALE + "[kernel_blocks]",
    ),
    Mutation(
        "graph: metadata that a backend cannot refresh is not built anew",
        V2,
        "not (mode == CUDAGraphMode.FULL and self.supports_decode_metadata_update)",
        "mode != CUDAGraphMode.FULL",
        STALE + "[rebuilt]",
    ),
    Mutation(
        "graph: rebuilt metadata reads lengths back",
        ATTENTION,
        "bound = torch.from_numpy(_padded(seq_lens_bound, num_reqs, 0))",
        "bound = self.buffers.seq_lens[:num_reqs].cpu()",
        READS,
    ),
    Mutation(
        "graph: metadata is rebuilt and nobody says so",
        V2,
        "self.attention.warn_of_rebuilt_metadata()",
        "pass",
        READS,
    ),
    Mutation(
        "piecewise: input rows stand elsewhere at every step",
        V2,
        "hidden_states = first_rows(self.hidden_states, batch.num_rows)",
        "hidden_states = self.hidden_states.new_empty(batch.num_rows, self.hidden_size)",
        MIXED,
    ),
    Mutation(
        "graph: padding requests keep a sequence",
        KERNEL,
        "tl.where(live, seq_len, 0).to(tl.int32)",
        "seq_len.to(tl.int32)",
        KERNEL_TEST,
    ),
    Mutation(
        "kernel: a number of the step is compiled in",
        PREPARE,
        '        "num_reqs",\n',
        "",
        "tests/kernels/test_launch.py::test_prepare_inputs",
        "plugin-v1",
    ),
    Mutation(
        "kernel: padding rows take mask_hidden",
        BROADCAST,
        "in_range & (source == MASK_ROW)",
        "in_range & (source < 0)",
        BROADCAST_TEST,
    ),
    Mutation(
        "kernel: select_candidates compiles anew for another K",
        SELECT,
        'do_not_specialize=["num_k", "last_position"]',
        'do_not_specialize=["last_position"]',
        "tests/kernels/test_aot.py::test_a_server_compiles_select_candidates_once",
        "plugin-v1",
    ),
    # vLLM's start-up.
    Mutation(
        "profile: the drafts' rows come off the target's batch",
        V2,
        "        self.num_query_per_req = self.num_speculative_steps\n",
        "        self.num_query_per_req = self.num_speculative_steps\n"
        "        self.num_extra_query_per_req = self.num_speculative_steps - 1\n",
        PROFILE,
    ),
    Mutation(
        "profile: more draft rows than heads are compiled for",
        GRAPH,
        "if lengths.sum() > max_num_tokens:",
        "if False:",
        PROFILE,
    ),
    Mutation(
        "profile: drafts look slots up in the block tables that vLLM has profiled with",
        V2,
        "            block_tables,\n            self.buffers,",
        '            self.__dict__.setdefault("first_tables", block_tables),\n            self.buffers,',
        "tests/v2/test_graph.py::test_drafts_after_vllm_has_profiled_the_memory_of_graphs[in_place]",
    ),
    Mutation(
        "a selector asks for a top-k that does not compile",
        GREEDY,
        "        succeeded = False\n",
        "",
        "tests/sampling/test_greedy.py::test_the_same_candidates_where_flashinfer_does_not_compile",
    ),
    Mutation(
        "each rank decides alone how it finds a selector's candidates",
        GREEDY,
        "return succeeded if head.tp_size == 1 else on_all_ranks(succeeded)",
        "return succeeded",
        "tests/sampling/test_greedy.py::test_ranks_find_the_candidates_alike",
    ),
    Mutation(
        "adaptive verification reads a selector's candidates alone",
        "src/peagle_vllm/v2/candidate_sampler.py",
        "return beside_others(scores, candidates.logits) if estimated",
        "return scores if estimated",
        "tests/v2/test_traps.py::test_adaptive_verification_reads_the_samples_of_a_step_that_wants_fewer_drafts",
    ),
    # New weights for a head that is served.
    Mutation(
        "V1 keeps m after an update of the head's weights",
        UPDATES,
        "        self.mask_is_stale = True\n",
        "",
        "tests/features/test_weight_update.py::test_drafts_follow_an_update",
    ),
    Mutation(
        "a selector outlives its head",
        UPDATES,
        "            turn_off(self._selector)\n",
        "",
        "tests/features/test_weight_update.py::test_a_selector_that_does_not_come_is_off_until_it_comes",
    ),
    Mutation(
        "an update takes the target's lm_head for the head's quantized copy of it",
        UPDATES,
        "        targets.update(copy for copy, source in _quantized_copies() if source in targets)\n",
        "",
        "tests/features/test_weight_update.py::test_a_quantized_copy_of_the_targets_lm_head_leaves_the_head",
    ),
    Mutation("drafts go on after a failed update", UPDATES, "        self._broken = True\n", "", FAILED_UPDATE),
    Mutation(
        "an update takes the target's modules apart",
        UPDATES,
        "            parent._modules.pop(name, None)\n",
        "            pass\n",
        FAILED_UPDATE,
    ),
    Mutation(
        "a failed update leaves half loaded layers",
        UPDATES,
        "            if info.can_load():\n",
        "            if False:\n",
        FAILED_UPDATE,
    ),
    # Windows, KV cache groups, block tables, and what an engine must give back.
    Mutation(
        "a head gets its target's window",
        LOADED,
        "cache_config.sliding_window, None",
        "cache_config.sliding_window, cache_config.sliding_window",
        MISTRAL,
    ),
    Mutation(
        "a head's own window is ignored",
        V1,
        "        check_loaded_head(self.model, self.vllm_config)\n",
        "        check_loaded_head(self.model, self.vllm_config)\n"
        "        for layer in self.model.model.layers:\n"
        "            layer.self_attn.attn.impl.sliding_window = -1\n",
        f"{FUZZ}[7]",
    ),
    Mutation(
        "groups: every layer reads the first group's slots",
        ATTENTION,
        "layer: buffers.slot_mappings[row]\n",
        "layer: buffers.slot_mappings[0]\n",
        f"{FUZZ}[128]",
    ),
    Mutation(
        "graph: the block table is a copy of capture time's",
        ATTENTION,
        "tuple(table[:num_reqs] for table in self.block_tables.input_block_tables)",
        "tuple(table[:num_reqs].clone() for table in self.block_tables.input_block_tables)",
        REPLAYED,
    ),
    Mutation(
        "drafts beside the request's top-k and top-p",
        V1,
        "logits = within_limits(logits, sampling_metadata)",
        "logits = logits",
        "tests/sampling/test_follows_target.py::test_drafts_are_within_the_limits[probabilistic]",
    ),
    Mutation(
        "V2: drafts beside the request's top-k and top-p",
        "src/peagle_vllm/v2/speculator.py",
        "        if self.draft_logits is not None:\n            out = self.buffers\n",
        "        if False:\n            out = self.buffers\n",
        "tests/sampling/test_follows_target.py::test_drafts_are_within_the_limits[probabilistic]",
    ),
    Mutation(
        "limit_logits: top-p at another temperature",
        LIMIT_LOGITS,
        "tl.exp((x - best) / heat)",
        "tl.exp(x - best)",
        "tests/kernels/test_limit_logits.py",
    ),
    Mutation(
        "limit_logits: top-p of all, not of top-k",
        LIMIT_LOGITS,
        "key >= low",
        "key >= 0",
        "tests/kernels/test_limit_logits.py",
    ),
    Mutation(
        "top_k alone ends the engine",
        "src/peagle_vllm/patches/cpu_sampling.py",
        "if patches.serving_peagle and not len(logits):",
        "if False:",
        "tests/drafts/test_stock_defects.py::test_top_k_alone_ends_the_engine_where_no_draft_is_verified",
    ),
    # Look-up.
    Mutation(
        "look-up: the earliest occurrence",
        LOOK_UP,
        "matched * (last + 1) + end, 0",
        "matched * (last + 1) + last - end, 0",
        LOOK_UP_TEST,
    ),
    Mutation(
        "look-up: a text that ends is not repeated",
        LOOK_UP,
        "end + 1 + column % (last - end)",
        "end + 1 + column",
        LOOK_UP_TEST,
    ),
    Mutation(
        "look-up: entries of q are not named",
        LOOK_UP,
        "tl.store(cached, token,",
        "tl.store(cached, tl.load(cached),",
        LOOK_UP_TEST,
    ),
    Mutation(
        "look-up: V1 does not know the bonus token", HISTORY, "self.token_ids[self.rows, self.last] =", "_ =", LOOKED_UP
    ),
    Mutation(
        "look-up: V1 does not know a cached prompt",
        HISTORY,
        "*(requests[req].prompt_token_ids or ())",
        "*()",
        LOOKED_UP,
    ),
    Mutation(
        "look-up: V1's sampler takes q for the head's", V1, "q = draft_probs.view", "q = draft_probs.clone().view", TOLD
    ),
    Mutation(
        "look-up: one token further on V2",
        V2,
        "self.buffers.sample_pos[first]",
        "self.buffers.sample_pos[first] + 1",
        LOOKED_UP,
    ),
    Mutation(
        "look-up: V2's sampler takes q for the head's",
        V2,
        "if self.draft_logits is not None:\n            cached",
        "if False:\n            cached",
        TOLD,
    ),
)
